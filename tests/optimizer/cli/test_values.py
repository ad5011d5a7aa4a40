"""Options from values, as `pipedream.optimize` has them, are those of the command line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from pipedream.graph.errors import UserError
from pipedream.optimizer.cli.command import main, typed_options
from pipedream.optimizer.cli.options import Options, option_types
from pipedream.optimizer.cli.values import make_options

GRAPH = Path("graph.txt")


def typed(*words: str) -> Options:
    context = click.Context(main)
    main.parse_args(context, [str(GRAPH), *words])
    return typed_options(context)


def test_the_command_has_an_option_for_each_field_and_its_default() -> None:
    names = {each.name for each in main.params} - {"graph", "version"}
    assert (
        names
        == set(option_types())
        == {each.name for each in fields(Options)}
        - {
            "graph",
            "typed",
        }
    )
    by_default = {**vars(typed()), "output": None}
    assert by_default == vars(make_options(GRAPH, {}))


GIVEN: dict[str, tuple[Any, list[str]]] = {
    "machines": ((4, 2), ["--machines", "4,2"]),
    "bandwidth": (["1GB", 2], ["--bandwidth", "1GB,2"]),
    "cluster": ("auto", ["--cluster", "auto"]),
    "speed": (2, ["--speed", "2"]),
    "layers": ("3", ["--layers", "3"]),
    "schedule": ("flush", ["--schedule", "flush"]),
    "straight": (True, ["--straight"]),
    "compare": (False, []),
    "memory": (None, []),
    "shard": (["*up=S(0)", "*=R"], ["--shard", "*up=S(0)", "--shard", "*=R"]),
    "export": ("torch", ["--export", "torch"]),
}


@pytest.mark.parametrize("name", GIVEN)
def test_values_are_those_of_words(name: str) -> None:
    value, words = GIVEN[name]
    made, wanted = make_options(GRAPH, {name: value}), typed(*words)
    assert getattr(made, name) == getattr(wanted, name)
    assert type(getattr(made, name)) is type(getattr(wanted, name))
    assert made.typed == wanted.typed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schedule", "zigzag"),
        ("order", "first"),
        ("cost_model", "best"),
        ("export", "tensorflow"),
        ("speed", 0),
        ("speed", "fast"),
        ("speed", float("nan")),
        ("epsilon", -1),
        ("layers", 0),
        ("microbatches", 2.5),
        ("stages_per_rank", 5),
    ],
)
def test_wrong_values_are_refused_in_the_same_words(name: str, value: Any) -> None:
    option = "--" + name.replace("_", "-")
    with pytest.raises(click.ClickException) as wanted:
        typed(option, str(value))
    with pytest.raises(UserError) as found:
        make_options(GRAPH, {name: value})
    assert found.value.format_message() == wanted.value.format_message()


def test_a_flag_is_true_or_false() -> None:
    with pytest.raises(UserError, match="'--straight': 'yes' is neither True nor False"):
        make_options(GRAPH, {"straight": "yes"})
