"""What a plan of groups keeps whole, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from pipedream.graph.model import Graph
from pipedream.graph.placements.operator_class import OperatorClass
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.optimizer.report.tables import table_of

_MOST_ROWS = 8


def groups_table(
    graph: Graph, groups: Sequence[Sequence[str]], classes: Mapping[str, OperatorClass]
) -> Table:
    """One row for each kind of group, those that take longest first: groups with the same layers.

    `inside`: bytes of a minibatch that layers of a group hand to each other, and no other reads.
    """
    kinds: dict[tuple[str, ...], list[Sequence[str]]] = {}
    for group in groups:
        kinds.setdefault(tuple(_layer(graph, name) for name in group), []).append(group)
    seconds = {
        kind: sum(graph.nodes[name].compute_seconds for own in same for name in own)
        for kind, same in kinds.items()
    }
    longest = sorted(kinds, key=lambda kind: -seconds[kind])
    rows = [
        {
            "number": str(len(kinds[kind])),
            "class": max(classes[name] for name in kinds[kind][0]).words,
            "time": show_seconds(seconds[kind]),
            "inside": show_bytes(sum(_inside(graph, own) for own in kinds[kind])),
            "layers": _words(kind),
        }
        for kind in longest[:_MOST_ROWS]
    ]
    caption = (
        "class: of the layer that needs most of its inputs; inside: bytes that no cut can cross."
    )
    if rest := longest[_MOST_ROWS:]:
        others = sum(len(kinds[kind]) for kind in rest)
        caption += (
            f" {others} more groups take {show_seconds(sum(map(seconds.__getitem__, rest)))}."
        )
    return table_of("Groups that stages keep whole", caption, rows, wrapped=("layers",))


def _layer(graph: Graph, name: str) -> str:
    return graph.nodes[name].description.partition("(")[0]


def _words(layers: Sequence[str]) -> str:
    """`Conv2d, 2 Add`: each layer once where it stands first."""
    counts = {layer: layers.count(layer) for layer in dict.fromkeys(layers)}
    return ", ".join(layer if count == 1 else f"{count} {layer}" for layer, count in counts.items())


def _inside(graph: Graph, group: Sequence[str]) -> float:
    members = set(group)
    return sum(
        graph.nodes[name].output_bytes
        for name in group
        if graph.successors[name] and members.issuperset(graph.successors[name])
    )
