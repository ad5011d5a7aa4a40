"""Files made to harm: nothing in them is executed, and nothing is written beside what was asked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from commands import typed
from mutated_files import READERS, read_mutated
from whole_files import whole_file

NAMES = (
    "../../harm",
    "/tmp/harm",
    "..",
    "a/b\\c",
    "$(touch harm)",
    "`touch harm`",
    "; touch harm;",
    "| touch harm",
    "__import__('os').system('touch harm')",
    "{0.__class__.__init__.__globals__}",
    "%(harm)s%n",
    "{{7*7}}${7*7}",
    "<script>alert(1)</script>",
    '" onload="alert(1)',
    "]]><!--",
    "\x1b]0;harm\x07\x1b[2J",
    "\u202eharm",
    "\u2028harm",
    "-rf",
    "--output=/tmp/harm",
    "~/harm",
    "CON",
    "a" * 5000,
    "\\N{BULLET}\\u0041",
    "tag:yaml.org,2002:python/name:os.system",
    "x -- y -- forward_compute_time=1",
)

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{chr(ord(name) - 1)}'] * 9)}]\n" for name in "bcdefghi"
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{chr(ord(name) - 1)}'] * 9)}]}}\n"
    for name in "bcdefghijk"
)
BOMBS = {
    "laughs": LAUGHS,
    "laughs inside": LAUGHS + "format: pipedream-run/1\nmodel: {source: x, args: *i}\n",
    "merges": MERGES,
    "a list in itself": "format: pipedream-run/1\nmodel: &m {source: x, args: *m}\n",
    "itself": "&a [*a]",
    "deep": "[" * 10_000,
    "deep fields": "{a: " * 10_000,
    "long": "a: " + "x" * 1_000_000,
    "many": "".join(f"a{number}: 1\n" for number in range(100_000)),
    "code": "model: !!python/object/apply:os.system ['touch harm']\n",
    "code, new": "model: !!python/object/new:os.system ['touch harm']\n",
    "name": "model: !!python/name:os.system\n",
    "module": "model: !!python/module:harm\n",
    "binary": "model: !!binary aGFybQ==\n",
}


@pytest.fixture(autouse=True)
def nothing_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test runs in a folder beside which nothing is to appear."""
    inside = tmp_path / "outer/inner/here"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    yield
    outside = {path for path in tmp_path.rglob("*") if inside not in path.parents}
    assert outside == {tmp_path / "outer", tmp_path / "outer/inner", inside}
    assert not list(tmp_path.rglob("*harm*"))
    assert not Path("/tmp/harm").exists()


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", ["cluster.yaml", "run.yaml"])
def test_a_yaml_bomb_is_refused(name: str, bomb: str) -> None:
    Path("read").mkdir()
    assert read_mutated(READERS[name], BOMBS[bomb].encode(), Path("read"))


@pytest.mark.parametrize(
    "name", ["plan.json", "profile.json", "operators.json", "measured.json", "state.json"]
)
def test_json_that_is_deep_long_or_no_text_is_refused(name: str) -> None:
    Path("read").mkdir()
    whole = whole_file(name)
    for content in (
        b'{"a":' * 100_000,
        b"[" * 100_000,
        whole.replace(b'"pipedream', b'"\\ud800pipedream', 1),
        whole.replace(b'"format"', b'"\\ud800"', 1),
        whole.replace(b'"format"', b'"__class__"', 1),
        b'{"a": ' + b"9" * 1_000_000 + b"}",
        b'"' + b"x" * 1_000_000 + b'"',
    ):
        assert read_mutated(READERS[name], content, Path("read"))


def graph_of(names: tuple[str, ...]) -> str:
    """A chain of layers whose ids, descriptions or both are these."""
    figures = "forward_compute_time=1.000, backward_compute_time=2.000, activation_size=8.0"
    lines = [
        f"{name} -- {name} -- {figures}, parameter_size=8.000" for name in map(in_a_line, names)
    ]
    ends = pairwise(map(in_a_line, names))
    return "\n".join(lines + [f"\t{source} -- {target}" for source, target in ends])


def in_a_line(name: str) -> str:
    return " ".join(name.replace(" -- ", " - ").split())


@pytest.mark.slow
def test_names_of_layers_are_only_text() -> None:
    Path("graph.txt").write_text(graph_of(NAMES), encoding="utf-8")
    asked = ["pd-optimize", "graph.txt", "--machines", "4", "--bandwidth", "1GB/s", "-o", "plan"]
    done = typed(Path.cwd(), asked)
    assert done.code == 0, done.error
    assert "\x1b]0" not in done.out + done.error
    assert {name for name in os.listdir() if name[0] != "."} == {"graph.txt", "plan"}
    for picture in Path("plan").rglob("*.svg"):
        assert "<script>" not in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_every_place_of_a_file(name: str) -> None:
    Path("read").mkdir()
    for kind, old in (
        ("plan.json", b'"a"'),
        ("plan.json", b'"weight-stashing"'),
        ("operators.json", b'"aten.mm.default"'),
        ("operators.json", b'"mm_1"'),
        ("measured.json", b'"cpu"'),
        ("state.json", b'"optimizer"'),
        ("timeline.csv", b"0F0"),
        ("every_field.yaml", b"nets:Mail"),
        ("model.safetensors.index.json", b'"model-00001-of-00001.safetensors"'),
    ):
        new = name.replace("\\", "\\\\").replace('"', '\\"').encode("utf-8")
        new = new if kind.endswith(".csv") else b'"' + new + b'"'
        assert old in whole_file(kind)
        read_mutated(READERS[kind], whole_file(kind).replace(old, new), Path("read"))
