"""The gradients of parameters that several stages hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.comm.transport import Transport


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
        self.stages = {stage for own in holders.values() for stage in own}
        self.come: dict[int, dict[str, Tensor]] = {}

    def add_up(
        self,
        stage: int,
        gradients: dict[str, Tensor],
        parameters: Mapping[str, Tensor],
        transport: Transport,
    ) -> None:
        """Hands in the gradients of a round of `stage`, by name; where one is missing it is zero.

        With the last stage of this rank they are replaced by the sums, in all of its stages; that
        waits for all ranks. Until then none of them may update. Raises PeerLost.
        """
        for name, own in self.holders.items():
            if stage in own and name not in gradients:
                gradients[name] = torch.zeros_like(parameters[name])
        self.come[stage] = gradients
        if len(self.come) < len(self.stages):
            return
        for name, own in self.holders.items():
            first, *others = (self.come[each][name] for each in sorted(own))
            for other in others:
                first += other
            if (group := self.groups[name]) is not None:
                transport.add_up([first], group)
            for other in others:
                other.copy_(first)
        self.come = {}
