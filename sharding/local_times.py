"""What part of an operator's time each device takes, once it is divided.

Small operators do not divide evenly: half a product may take more than half the time. Where the
whole operator and the local one were timed in the same way (`pd-profile --shards`), their ratio
says so; else a device takes the part of the work that it has. Only shards divide work: of an
operator whose inputs are terms of a sum, each device does all there is to do.
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

    @staticmethod
    def of(timed: Iterable[TimedOperator]) -> LocalTimes:
        return LocalTimes({each.operator: each.seconds for each in timed})

    def share(self, operator: Operator, strategies: Sequence[Strategy], mesh: Mesh) -> float:
        """Returns the seconds of the device with the largest parts, in those of the whole operator.

        `strategies`: one for each axis, or for the first axes, of the mesh.
        """
        whole = self.seconds.get(operator) if self.seconds else None
        if whole:
            local = operator
            for strategy, devices in zip(strategies, mesh, strict=False):
                local = local_operator(local, strategy, devices, 0)
            if local == operator:  # as where a device has but terms of a sum
                return 1.0
            own = self.seconds.get(local)
            if own is not None:
                return own / whole
        return largest_share(operator, strategies, mesh)


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
