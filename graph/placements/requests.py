"""The placements that a user sets, checked against a graph. Errors are one line each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from pydantic import Field

from pipedream.graph.errors import ArtifactModel, UserError
from pipedream.graph.placements.operators import OperatorGraph, StageInput
from pipedream.graph.placements.placement import (
    Mesh,
    Partial,
    Placements,
    parse_placements,
    show_placements,
)
from pipedream.graph.placements.regions import check_placements
from pipedream.graph.placements.strategy_texts import NodeStrategies


@dataclass(frozen=True)
class Requests:
    """Holds a placement for each axis of the mesh, for each name or pattern."""

    parameters: Mapping[str, Placements] = field(default_factory=dict)
    """By a pattern of names of parameters and buffers, such as `blocks.*.up.weight`. Of several
    that match the first counts.
    """
    values: Mapping[str, Placements] = field(default_factory=dict)
    """By the name of the value, or `input 0` for the first input of the stage."""
    operators: Mapping[str, tuple[Placements, ...]] = field(default_factory=dict)
    """By the name of the call: how it wants each tensor that it reads."""


class PlacementTexts(ArtifactModel):
    """Requests as plan.json has them, in DTensor's notation: `S(0),R`."""

    parameters: dict[str, str] = Field(default={})
    """As `Requests.parameters`."""
    values: dict[str, str] = Field(default={})
    """As `Requests.values`."""
    flops_per_second: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of the device that was profiled, in matrix products and the like. Without, an operator may be
    computed by all devices to save a message.
    """
    operators: tuple[NodeStrategies, ...] = ()
    """How each operator is divided; what follows for the others is found in each rank."""
    received: dict[str, str] = Field(default={})
    """How the stage takes what other stages send, by the node that makes it; else it comes whole,
    or as `values` say.
    """

    def taken(self, axes: int) -> dict[str, Placements]:
        """Returns `received`. Raises ValueError that names a wrong placement."""
        return {name: _read(name, text, axes) for name, text in self.received.items()}

    def requests(self, axes: int) -> Requests:
        """Returns the requests for so many axes. Raises ValueError that names a wrong placement."""
        parameters, values = (
            {name: _read(name, text, axes) for name, text in texts.items()}
            for texts in (self.parameters, self.values)
        )
        for each in self.operators:
            each.check(axes)
        self.taken(axes)
        return Requests(parameters, values)


def _read(name: str, text: str, axes: int) -> Placements:
    try:
        placements = parse_placements(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if len(placements) != axes:
        raise ValueError(f"{name}: {text} has {len(placements)} placements for {axes} mesh axes")
    if Partial() in placements:
        raise ValueError(f"{name}: {text} is a sum, which only operators can give: write R or S(0)")
    return placements


def requested_values(graph: OperatorGraph, mesh: Mesh, requests: Requests) -> dict[str, Placements]:
    """Returns the placements set for values, parameters among them, by name. Raises UserError."""
    requested: dict[str, Placements] = {}
    for each, pattern, placements in _matches(graph, requests.parameters):
        where = f"parameters.{pattern}"
        _check(f"{where}: {each.name}", each.type.shape, mesh, placements)
        _no_sum(where, placements)
        requested.setdefault(each.value, placements)
    described = {f"{each.role} {each.name}": each.value for each in graph.inputs}
    types = graph.types()
    for name, placements in requests.values.items():
        value = described.get(name, name)
        if value not in types:
            close = _closest(name, [*described, *types])
            raise UserError(f"values.{name}: no value has this name{close}")
        _check(f"values.{name}: it", types[value].shape, mesh, placements)
        if value in described.values():
            _no_sum(f"values.{name}", placements)
        requested[value] = placements
    return requested


def requested_operators(
    graph: OperatorGraph, mesh: Mesh, requests: Requests
) -> dict[str, tuple[Placements, ...]]:
    """Returns the placements set for what operators read, by name of the call. Raises UserError."""
    calls = {call.name: call for call in graph.calls}
    for name, inputs in requests.operators.items():
        if name not in calls:
            raise UserError(f"operators.{name}: no operator has this name{_closest(name, calls)}")
        types = calls[name].operator.inputs
        if len(inputs) != len(types):
            raise UserError(
                f"operators.{name}: it reads {len(types)} tensors, {len(inputs)} have placements: "
                "give placements for each"
            )
        for number, (type_, placements) in enumerate(zip(types, inputs, strict=True)):
            _check(f"operators.{name}: tensor {number}", type_.shape, mesh, placements)
    return dict(requests.operators)


def _matches(
    graph: OperatorGraph, patterns: Mapping[str, Placements]
) -> Iterator[tuple[StageInput, str, Placements]]:
    named = [each for each in graph.inputs if each.role in ("parameter", "buffer")]
    for pattern, placements in patterns.items():
        matching = [each for each in named if fnmatchcase(each.name, pattern)]
        if not matching:
            names = [each.name for each in named]
            raise UserError(
                f"parameters.{pattern}: no parameter has this name{_closest(pattern, names)}"
            )
        yield from ((each, pattern, placements) for each in matching)


def _check(what: str, shape: tuple[int, ...], mesh: Mesh, placements: Placements) -> None:
    try:
        check_placements(shape, mesh, placements)
    except ValueError as error:
        shown = show_placements(placements)
        raise UserError(f"{what} of shape {shape} cannot be placed {shown}: {error}") from error


def _no_sum(where: str, placements: Placements) -> None:
    if Partial() in placements:
        raise UserError(
            f"{where}: {show_placements(placements)} is a sum, which only operators can give: "
            "write R or S(0)"
        )


def _closest(name: str, names: Collection[str]) -> str:
    close = get_close_matches(name, names, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
