"""What part of an operator's time each device takes, once it is divided.

Small operators do not divide evenly: half a product may take more than half the time. Where the
whole operator and the local one were timed in the same way (`pd-profile --shards`), their ratio
says so. Where only its half was timed, what half an operator takes more than half of the time does
not divide, among however many devices. Else a device takes the part of the work that it has. Only
shards divide work: of an operator whose inputs are terms of a sum, each device does all there is to
do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipedream.graph.placements.operators import Operator, TimedOperator
from pipedream.graph.placements.placement import Mesh, Shard
from pipedream.sharding.rules import local_operator
from pipedream.sharding.rules.strategy import Strategy


@dataclass(frozen=True)
class LocalTimes:
    seconds: Mapping[Operator, float] = field(default_factory=dict)
    """Of whole and of local operators, timed in the same way."""
    _halves: dict[tuple[Operator, Strategy], tuple[float, float] | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @staticmethod
    def of(timed: Iterable[TimedOperator]) -> LocalTimes:
        return LocalTimes({each.operator: each.seconds for each in timed})

    def share(self, operator: Operator, strategies: Sequence[Strategy], mesh: Mesh) -> float:
        """Returns the seconds of the device with the largest parts, in those of the whole operator.

        `strategies`: one for each axis, or for the first axes, of the mesh.
        """
        whole = self.seconds.get(operator) if self.seconds else None
        if whole:
            local = first_part(operator, strategies, mesh)
            if local == operator:  # as where a device has but terms of a sum
                return 1.0
            own = self.seconds.get(local)
            if own is not None:
                return own / whole
            return self._as_halves(operator, strategies, mesh)
        return largest_share(operator, strategies, mesh)

    def is_timed(self, operator: Operator, strategies: Sequence[Strategy], mesh: Mesh) -> bool:
        """Tells whether the share is measured: whole and part were timed, or are the same."""
        part = first_part(operator, strategies, mesh)
        return part == operator or {operator, part} <= self.seconds.keys()

    def _as_halves(self, operator: Operator, strategies: Sequence[Strategy], mesh: Mesh) -> float:
        """Returns the share of what was not timed, after what was of its halves along each axis."""
        even = largest_share(operator, strategies, mesh)
        pairs = [half for each in strategies if (half := self._half(operator, each))]
        if not pairs:
            return even
        more = max(taken - part for taken, part in pairs)
        return even + more if more > 0 else even * max(taken / part for taken, part in pairs)

    def _half(self, operator: Operator, strategy: Strategy) -> tuple[float, float] | None:
        """Returns the share of one of two devices, as timed and by its part; None if unknown."""
        key = operator, strategy
        if key not in self._halves:
            local, part = local_operator(operator, strategy, 2, 0), None
            if local != operator and local in self.seconds:
                taken = self.seconds[local] / self.seconds[operator]
                part = taken, largest_share(operator, (strategy,), (2,))
            self._halves[key] = part
        return self._halves[key]


def first_part(operator: Operator, strategies: Sequence[Strategy], mesh: Mesh) -> Operator:
    """Returns what the first device, which has the largest parts, has of the operator.
    `strategies`: as in `LocalTimes.share`.
    """
    for strategy, devices in zip(strategies, mesh, strict=False):
        operator = local_operator(operator, strategy, devices, 0)
    return operator


def largest_share(operator: Operator, strategies: Sequence[Strategy], mesh: Mesh) -> float:
    """Returns the part of the elements that the first device has, along the first dimension that
    each axis shards.
    """
    share, sizes = 1.0, dict[tuple[int, int], int]()
    types = (*operator.inputs, *operator.outputs)
    for strategy, devices in zip(strategies, mesh, strict=False):
        part = None
        for tensor, placement in enumerate((*strategy.inputs, *strategy.outputs)):
            type_ = types[tensor]
            if type_ is None or not isinstance(placement, Shard):
                continue
            dim, chunks = placement.dim, placement.chunks
            size = sizes.get((tensor, dim), type_.shape[dim])
            sizes[tensor, dim] = largest = chunks * -(-(size // chunks) // devices)
            part = part or largest / size
        share *= part or 1.0
    return share
