"""What joins the stages of a rank to those of other ranks: messages, and sums over replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.capture.loss import Loss
from pipedream.comm.communicators import Communicators, for_messages
from pipedream.comm.stage_groups import StageGroups, SummingRanks
from pipedream.comm.teams import Axes
from pipedream.comm.transport import Transport
from pipedream.graph.plan import Plan
from pipedream.runtime.engine.executor import Executor, Updates
from pipedream.runtime.engine.offload import OffloadedActivations
from pipedream.runtime.optim.weights import Weights
from pipedream.runtime.stages.randomness import MinibatchRng
from pipedream.runtime.stages.sharded_stage import ShardedStage
from pipedream.runtime.stages.stage_forms import StageForms
from pipedream.schedule.action import StageLink
from pipedream.schedule.channel import team_links

_NOTHING_PARTIAL: Mapping[int, Collection[Axes]] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Wiring:
    """How a rank reaches the others: its `transport`, and by stage of this rank the `groups` of
    ranks that add up gradients. `rng` seeds the passes.
    """

    plan: Plan
    rng: MinibatchRng
    groups: Mapping[int, StageGroups]
    transport: Transport

    @staticmethod
    def of(
        plan: Plan,
        links: Iterable[StageLink],
        tied: Mapping[str, Sequence[int]],
        rng: MinibatchRng,
        backend: str,
        timeout: float,
        partial: Mapping[int, Collection[Axes]] = _NOTHING_PARTIAL,
    ) -> Wiring:
        """Called by all ranks at the same time. `links`: the pairs of stages that exchange tensors;
        `tied`: the stages that hold a parameter, where there are several; `partial`: see
        `SummingRanks`. Operations fail after `timeout` seconds. Raises PeerLost, and UserError if
        there are too many others to connect to.
        """
        assignment = plan.rank_assignment
        meshes = {stage.stage: stage.mesh for stage in plan.stages if stage.mesh is not None}
        summing = SummingRanks(assignment, dist.get_rank(), tied, meshes, partial)
        messages = for_messages(team_links(assignment, links), backend)
        wanted = [*summing.communicators(), *messages]
        communicators = Communicators.connect(wanted, rng.device, backend, timeout)
        transport = Transport(rng.device, backend, communicators.links)
        return Wiring(plan, rng, summing.groups(communicators), transport)

    def executor(
        self,
        stage: int,
        stage_modules: StageForms,
        loss: Loss,
        weights: Weights,
        stepping: Updates,
        on_loss: Callable[[int, Tensor], None],
        *,
        per_update: int = 1,
        sharding: ShardedStage | None = None,
    ) -> Executor:
        """Returns what trains a stage of this rank."""
        return Executor(
            stage_modules=stage_modules,
            transport=self.transport,
            assignment=self.plan.rank_assignment,
            loss=loss,
            weights=weights,
            stepping=stepping,
            groups=self.groups[stage],
            on_loss=on_loss,
            rng=self.rng,
            per_update=per_update,
            recompute=self.plan.stages[stage].recomputes_all,
            offload=OffloadedActivations(self.rng.device)
            if self.plan.stages[stage].offload
            else None,
            sharding=sharding,
        )

    def average_buffers(self, stage: int, buffers: Mapping[str, Tensor]) -> None:
        """Makes the statistics of batch norm and the like their mean over the replicas."""
        self.transport.average(list(buffers.values()), self.groups[stage].replicas)

    def add_up(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over all ranks."""
        self.transport.begin_sum(tensor, None).wait()

    def total(self, values: Iterable[Tensor]) -> Tensor:
        """Returns the sum of the values of all ranks, as a float64 scalar."""
        total = torch.zeros(1, dtype=torch.float64, device=self.rng.device)
        for value in values:
            total += value.detach().to(self.rng.device)
        self.add_up(total)
        return total[0]
