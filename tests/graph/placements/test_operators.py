"""operators.json: what it may not say of its operators."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whole_files import whole_file

from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import read_operators, write_operators

Change = Callable[[dict[str, Any]], object]


def test_it_reads_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "operators.json"
    path.write_bytes(whole_file("operators.json"))
    operators = read_operators(path)
    write_operators(operators, path)
    assert read_operators(path) == operators
    assert operators.graph.types()["mm_1"].shape == (4, 2)


def call(number: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def of(data: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = data["graph"]["calls"][number]
        return found

    return of


WRONG: dict[str, tuple[Change, str]] = {
    "unknown operator": (lambda d: d["nodes"].update(sum="a"), "nodes: there is no operator sum"),
    "time of none": (lambda d: d["seconds"].update(sum=1), "seconds: there is no operator sum"),
    "endless time": (lambda d: d["seconds"].update(mm=float("inf")), "finite"),
    "no node": (lambda d: d["nodes"].pop("t"), "nodes: t belongs to none"),
    "unknown value": (
        lambda d: call(0)(d).update(reads=["x", "v"]),
        "mm: there is no value v before it",
    ),
    "too late": (
        lambda d: call(0)(d).update(reads=["x", "t"]),
        "mm: there is no value t before it",
    ),
    "computed twice": (lambda d: call(1)(d).update(results=["mm"]), "mm is there twice"),
    "called twice": (lambda d: call(1)(d).update(name="mm"), "mm is there twice"),
    "too few reads": (lambda d: call(0)(d).update(reads=["x"]), "not as many as the operator has"),
    "no such input": (
        lambda d: call(2)(d)["operator"].update(arguments=[{"input": 1}]),
        "t: an argument is none of the operator's inputs",
    ),
    "writes another": (
        lambda d: call(2)(d)["operator"].update(writes=[1]),
        "t: an argument is none of the operator's inputs",
    ),
    "not computed": (
        lambda d: call(2)(d)["operator"].update(outputs=[None]),
        "t: t is not computed",
    ),
    "endless local time": (
        lambda d: d["local_seconds"][0].update(seconds=float("inf")),
        "local_seconds",
    ),
    "timed twice": (
        lambda d: d["local_seconds"].append(d["local_seconds"][0]),
        "local_seconds.2: aten.mm.default is there twice",
    ),
    "no such input of what is timed": (
        lambda d: d["local_seconds"][1]["operator"].update(writes=[2]),
        "local_seconds.1: an argument is none of the operator's inputs",
    ),
    "no such output": (
        lambda d: d["graph"]["outputs"][0].update(value="z"),
        "outputs: there is no value z",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_in_one_line(wrong: str, tmp_path: Path) -> None:
    change, told = WRONG[wrong]
    data = json.loads(whole_file("operators.json"))
    change(data)
    path = tmp_path / "operators.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError) as refused:
        read_operators(path)
    message = refused.value.format_message()
    assert message.startswith(str(path))
    assert told in message
    assert "\n" not in message
