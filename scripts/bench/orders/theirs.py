"""Rounds of torch.distributed.pipelining, under one of its own schedules."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from divided import BENCH, MODELS, modules
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from pipedream.capture.sources.load import load_config_model
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.optim.optimizers import make_optimizer

SCHEDULES: Mapping[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}


class Theirs:
    """This rank's stages of a model, as plain modules. Made by all ranks at the same time."""

    def __init__(
        self,
        name: str,
        rank: int,
        order: str,
        rank_map: Sequence[int],
        batch: Batch,
        loss: Callable[[Any, Any], Tensor],
        microbatches: Sequence[int],
    ) -> None:
        config = MODELS[name].run
        whole = load_config_model(config, BENCH)
        parts = modules(name, whole, len(rank_map))
        own = {stage: parts[stage] for stage, place in enumerate(rank_map) if place == rank}
        self.first, self.last = 0 in own, len(rank_map) - 1 in own
        self.batch, self.losses = batch, list[Tensor]()
        named = nn.ModuleList(own.values()).named_parameters()
        self.optimizer = make_optimizer(config.optimizer, dict(named))
        self.schedules = {
            m: self._schedule(SCHEDULES[order], own, len(rank_map), m, loss) for m in microbatches
        }

    @staticmethod
    def _schedule(
        kind: Any, own: Mapping[int, nn.Module], stages: int, microbatches: int, loss: Any
    ) -> Any:
        """With stages of its own, whose buffers are for so many microbatches."""
        device = torch.device("cpu")
        made = [PipelineStage(module, at, stages, device) for at, module in own.items()]
        return kind(made[0] if kind is Schedule1F1B else made, microbatches, loss_fn=loss)

    def rounds(self, microbatches: int, rounds: int) -> list[float]:
        """Seconds from the end of each round to that of the next, on this rank."""
        schedule = self.schedules[microbatches]
        inputs = (torch.cat([self.batch.inputs[0]] * microbatches),) if self.first else ()
        target = torch.cat([self.batch.target] * microbatches) if self.last else None
        losses = self.losses if self.last else None
        dist.barrier()
        ends = []
        for _ in range(rounds):
            schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
            self.optimizer.step()
            self.optimizer.zero_grad()
            ends.append(time.perf_counter())
        return [after - before for before, after in pairwise(ends)]
