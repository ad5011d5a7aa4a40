"""The gradients of parameters that several stages hold.

A stage on a mesh has its part of them on each device. So the sum is made of whole gradients: each
device adds what it has to zeros, all that hold the parameter add these up, and each takes its part
of the sum. All have the same sum, bit for bit, whatever their meshes are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.comm.redistribute import extract
from pipedream.comm.transport import Transport
from pipedream.graph.placements.placement import Mesh, Placements, Replicate, coordinates
from pipedream.graph.placements.regions import Region, blocks, held_region, whole


@dataclass(frozen=True)
class GradientPart:
    """Says what a device of a mesh has of a gradient of this `shape`. `counts`: whether it is a
    term of a sum over the devices; of those that have the same part, that of the first is.
    """

    shape: tuple[int, ...]
    region: Region
    counts: bool

    @staticmethod
    def of(shape: tuple[int, ...], mesh: Mesh, placements: Placements, device: int) -> GradientPart:
        places = zip(coordinates(mesh, device), placements, strict=True)
        is_first = all(place == 0 or each != Replicate() for place, each in places)
        return GradientPart(shape, held_region(shape, mesh, placements, device), is_first)


PartOf = Callable[[str], GradientPart]
"""By the name of the parameter."""


class TiedSums:
    """Adds them up over the stages of this rank, then over the ranks.

    `holders`: by name of the parameter the stages of this rank that hold it; `groups`: the ranks
    that do, None where it is this one alone.
    """

    def __init__(
        self,
        holders: Mapping[str, Collection[int]],
        groups: Mapping[str, dist.ProcessGroup | None],
    ) -> None:
        self.holders, self.groups = holders, groups
        self.stages = {stage for stages in holders.values() for stage in stages}
        self.rounds: dict[int, _StageRound] = {}

    def add_up(
        self,
        stage: int,
        gradients: dict[str, Tensor],
        parameters: Mapping[str, Tensor],
        transport: Transport,
        part_of: PartOf | None = None,
    ) -> None:
        """Hands in the gradients of a round of `stage`, by name; where one is missing it is zero.
        `part_of`: what they are of the whole ones, if the stage has a mesh.

        With the last stage of this rank they are replaced by the sums, in all of its stages; that
        waits for all ranks. Until then none of them may update. Raises PeerLost.
        """
        self.rounds[stage] = _StageRound(gradients, parameters, part_of)
        if len(self.rounds) < len(self.stages):
            return
        for name, stages in self.holders.items():
            self._add_up(name, [self.rounds[each] for each in sorted(stages)], transport)
        self.rounds = {}

    def _add_up(self, name: str, rounds: Collection[_StageRound], transport: Transport) -> None:
        first = next(iter(rounds))
        parameter = first.parameters[name]
        if not parameter.requires_grad:
            return
        total = torch.zeros(first.shape(name), dtype=parameter.dtype, device=parameter.device)
        for stage_round in rounds:
            stage_round.add_to(total, name)
        if (group := self.groups[name]) is not None:
            transport.begin_sum(total, group).wait()
        for stage_round in rounds:
            stage_round.take(name, total)


@dataclass(frozen=True)
class _StageRound:
    """The gradients of one stage of this rank, until all of its stages have theirs."""

    gradients: dict[str, Tensor]
    parameters: Mapping[str, Tensor]
    part_of: PartOf | None

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the whole parameter."""
        return self._part(name).shape

    def add_to(self, total: Tensor, name: str) -> None:
        part = self._part(name)
        if part.counts and name in self.gradients:
            for there, here in blocks(part.region, whole(part.shape)):
                total[there] += self.gradients[name][here]

    def take(self, name: str, total: Tensor) -> None:
        """Copies its part of the sum to memory of its own: each stage changes it further."""
        part = self._part(name)
        if name not in self.gradients:
            self.gradients[name] = torch.empty_like(self.parameters[name].data)
        self.gradients[name].copy_(extract(total, whole(part.shape), part.region))

    def _part(self, name: str) -> GradientPart:
        if self.part_of is not None:
            return self.part_of(name)
        shape = tuple(self.parameters[name].shape)
        return GradientPart(shape, whole(shape), counts=True)
