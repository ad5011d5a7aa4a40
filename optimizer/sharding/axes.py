"""What each axis of a mesh divides, in words: examples, positions or features of some layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from pipedream.graph.placements.operators import OperatorCall, flops
from pipedream.graph.placements.placement import Placement, Replicate, Shard
from pipedream.graph.profile import Profile
from pipedream.optimizer.report.tables import show_count
from pipedream.optimizer.sharding.model_sharding import ModelSharding

_WHOLE = "whole"
_KEPT = "with parameters kept in parts"
"""They are gathered for the work, as in ZeRO."""


def axis_words(sharding: ModelSharding, profile: Profile, nodes: Collection[str]) -> str:
    """`axis 0 of 2: examples of 3 layers; axis 1 of 4: features of 2 layers, 1 whole`, of those of
    the nodes that have parameters.
    """
    layers = [n.id for n in profile.nodes if n.id in nodes and n.parameters]
    calls: dict[str, list[OperatorCall]] = {}
    for call in sharding.assignment.graph.calls:
        if call.name not in sharding.backward:
            calls.setdefault(sharding.profile.nodes[call.name], []).append(call)
    texts = []
    for axis, size in enumerate(sharding.mesh):
        kinds = Counter(
            _kind(sharding, profile.node[layer].parameters, calls.get(layer, []), axis)
            for layer in layers
        )
        parts = [_part(kind, kept, count) for (kind, kept), count in kinds.most_common()]
        texts.append(f"axis {axis} of {size}: {', '.join(parts) or 'no layers'}")
    return "; ".join(texts)


def _part(kind: str, kept: bool, count: int) -> str:
    words = f"{count} whole" if kind == _WHOLE else f"{kind} of {show_count(count, 'layer')}"
    return f"{words} {_KEPT}" if kept else words


def _kind(
    sharding: ModelSharding, parameters: Collection[str], calls: Collection[OperatorCall], axis: int
) -> tuple[str, bool]:
    """Returns what the axis divides of the work of a layer, by what the layer's products, or else
    all its operators, give; and whether it divides parameters for none of that.
    """
    products = [call for call in calls if flops(call.operator)]
    given = _given(sharding, products or calls, axis)
    kind = next((_words(each, dims) for each, dims in given if each != Replicate()), _WHOLE)
    placed = (sharding.parameters.get(name) for name in parameters)
    divided = any(its is not None and its[axis] != Replicate() for its in placed)
    return kind, divided and kind != "features"


def _given(
    sharding: ModelSharding, calls: Collection[OperatorCall], axis: int
) -> Iterator[tuple[Placement, int]]:
    """Yields the placement of each result on the axis, and its number of dimensions."""
    for call in calls:
        for value in call.results:
            if value is not None:
                dims = len(sharding.types[value].shape)
                yield sharding.assignment.placed[value][axis], dims


def _words(placement: Placement, dims: int) -> str:
    if not isinstance(placement, Shard) or placement.dim == dims - 1:
        return "features"  # or terms of sums over them
    return "examples" if placement.dim == 0 else "positions"
