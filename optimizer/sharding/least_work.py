"""What no plan takes less than, however its operators are divided: the certificate of a plan whose
stages may be meshes. An all-reduce of replicas is no floor then: a divided parameter needs none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

from pipedream.graph.placements.operators import Operator, OperatorProfile, TensorType, flops
from pipedream.optimizer.choose.bound import shared_out
from pipedream.optimizer.search.request import Request
from pipedream.sharding.local_times import LocalTimes

_ROUNDED = 8
"""Elements by which the largest part of a dimension may be above an even one: one for each of the
chunks that it is divided in.
"""


def least_seconds(request: Request, profile: OperatorProfile) -> float:
    """Seconds per minibatch of all work, shared out evenly among all devices: of operators, calls,
    sums of gradients and updates, of which each part of a parameter has at least one. `request`:
    for single devices.
    """
    graph, shares = request.graph, _node_shares(profile, request.cluster.machines[0])
    seconds = (
        graph.nodes[name].compute_seconds * shares.get(name, 1.0)
        for name in request.planning.position
    )
    return shared_out(request, sum(seconds))


def _node_shares(profile: OperatorProfile, devices: int) -> dict[str, float]:
    """By node: what all devices together take at least, in what one takes. Less than 1 only where a
    divided operator was measured to take less than its part. `devices`: those of every mesh divide
    so many.
    """
    times = LocalTimes.of(profile.local_seconds)
    if not times.seconds:
        return {}
    parts = [count for count in range(1, devices + 1) if devices % count == 0]
    least = lru_cache(maxsize=None)(lambda operator: _share(operator, times.seconds, parts))
    whole, own = defaultdict[str, float](float), defaultdict[str, float](float)
    for call in profile.graph.calls:
        node, seconds = profile.nodes[call.name], profile.seconds.get(call.name, 0.0)
        whole[node] += seconds
        own[node] += seconds * least(call.operator)
    return {node: own[node] / seconds for node, seconds in whole.items() if seconds}


def _share(operator: Operator, seconds: Mapping[Operator, float], counts: Sequence[int]) -> float:
    """The least that an operator's parts take together, where each dimension may be divided into so
    many. The devices of a division are no fewer than the parts of any of its tensors, so this is a
    bound also where the division is not known.
    """
    whole = seconds.get(operator)
    if not whole:
        return 1.0
    parts = (
        own / whole * _devices(operator, local)
        for local, own in seconds.items()
        if local.target == operator.target and _is_part(local, operator, counts)
    )
    return min(1.0, *parts)


def _tensors(operator: Operator) -> list[TensorType | None]:
    return [*operator.inputs, *operator.outputs]


def _is_part(local: Operator, whole: Operator, counts: Sequence[int]) -> bool:
    pairs = list(zip(_tensors(local), _tensors(whole), strict=False))
    return len(_tensors(local)) == len(_tensors(whole)) and all(
        (one is None) == (other is None)
        and (one is None or other is None or _fits(one.shape, other.shape, counts))
        for one, other in pairs
    )


def _fits(part: tuple[int, ...], whole: tuple[int, ...], counts: Sequence[int]) -> bool:
    return len(part) == len(whole) and all(
        any(size <= own * count < size + count * _ROUNDED for count in counts)
        for own, size in zip(part, whole, strict=True)
    )


def _devices(whole: Operator, local: Operator) -> float:
    """How many devices there are at least, with so large a part of each tensor: as many as any is
    divided into, and as do all of the flops together, as where a product is divided along all three
    of its dimensions.
    """
    pairs = zip(_tensors(whole), _tensors(local), strict=True)
    ratios = (
        one.bytes / own.bytes
        for one, own in pairs
        if one is not None and own is not None and own.bytes
    )
    return max(flops(whole) / (flops(local) or math.inf), *ratios, 1.0)
