"""Rounds of pd-train's engine, under one rank map."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from divided import BENCH, MODELS
from efficiency import Same
from torch import Tensor

from pipedream.comm.buckets import StageGroups
from pipedream.comm.rank_info import RankInfo
from pipedream.comm.transport import Transport
from pipedream.graph.plan import Plan
from pipedream.runtime.engine.action_stream import ActionStream
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.engine.executor import Executor
from pipedream.runtime.engine.training_segment import TrainingSegment
from pipedream.runtime.engine.weights import Weights
from pipedream.runtime.job import Job
from pipedream.runtime.local_model import LocalModel
from pipedream.runtime.local_stage import LocalStage
from pipedream.runtime.optim.rates import LossSum
from pipedream.runtime.optim.stepping import Stepping
from pipedream.runtime.stages.partition import links
from pipedream.schedule.action import BACKWARDS, Kind
from pipedream.schedule.channel import rank_links
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PassTimes, PipelineSpec

Durations = dict[tuple[int, Kind], list[float]]
"""Seconds of the passes and updates of each stage."""


class Ours:
    """This rank's stages of a model. Made by all ranks at the same time."""

    def __init__(self, name: str, rank: int, folder: Path, plan: Plan) -> None:
        job = Job(plan, MODELS[name].run, BENCH, folder / f"{plan.order}", schedule="flush")
        self.local = LocalModel(job, RankInfo(rank, 2, rank, 2, "127.0.0.1", 0))
        self.batch = self.local.examples.epoch(1).batch(0)
        ways = rank_links(plan.rank_assignment, links(self.local.interfaces))
        self.transport = Transport(torch.device("cpu"), "gloo", ways)
        self.durations: dict[str, Durations] = defaultdict(lambda: defaultdict(list))
        self.losses: list[float] = []

    def spec(self, order: str, microbatches: int, times: PassTimes | None = None) -> PipelineSpec:
        plan = self.local.job.plan
        ways = links(self.local.interfaces)
        return PipelineSpec(
            "flush",
            plan.replicas,
            ways,
            microbatches,
            order=order,
            rank_map=plan.rank_map,
            times=times,
        )

    def rounds(self, spec: PipelineSpec, rounds: int) -> list[float]:
        """Seconds from the end of each round to that of the next, on this rank."""
        minibatches = rounds * spec.microbatches
        actions = Schedule(spec, minibatches).actions(*self.local.workers)
        engine = Engine(
            {stage.stage: self._executor(stage) for stage in self.local.stages}, self.transport
        )
        dist.barrier()
        engine.run(ActionStream(TrainingSegment(0, minibatches), actions), Same(self.batch))
        ends: dict[int, float] = {}
        own = self.durations[spec.order]
        for action, begin, end in engine.events:
            if action.kind in (Kind.FORWARD, Kind.UPDATE, *BACKWARDS):
                own[action.stage, Kind(action.kind)].append(end - begin)
            if action.kind is Kind.UPDATE:
                ends[action.version] = end
        return [after - before for before, after in pairwise(ends.values())]

    def _executor(self, stage: LocalStage) -> Executor:
        losses = LossSum(lambda tensor: None, torch.device("cpu"))
        steppings = {stage.stage: stage.make_stepping({})}
        return Executor(
            stage_modules=stage.stage_modules,
            transport=self.transport,
            assignment=self.local.job.plan.rank_assignment,
            loss=self.local.loss,
            weights=Weights(stage.parameters),
            stepping=Stepping(steppings, self.local.job.config, losses, losses.add_up),
            groups=StageGroups(None),
            on_loss=self._on_loss,
            rng=self.local.rng,
        )

    def _on_loss(self, minibatch: int, loss: Tensor) -> None:
        self.losses.append(loss.item())

    def all_durations(self, order: str) -> Durations:
        """Of all stages; every rank calls it."""
        ranks: list[Durations] = [{}, {}]
        dist.all_gather_object(ranks, dict(self.durations[order]))
        return {key: spans for own in ranks for key, spans in own.items()}


def pass_times(durations: Durations, spec: PipelineSpec, share: float = 0.5) -> PassTimes:
    """Medians, or what `share` of the passes do not exceed. A stage with whole backward passes
    alone sends no gradients: in halves it would do all of them in the second.

    Messages take no time: they are on their way while the ranks compute.
    """
    stages = range(len(spec.replicas))
    spans = {key: float(np.quantile(each, share)) for key, each in durations.items()}
    whole = [spans.get((stage, Kind.BACKWARD), 0.0) for stage in stages]
    none, ones = (0.0,) * len(spec.links), (1.0,) * len(stages)
    return PassTimes(
        forward=tuple(spans[stage, Kind.FORWARD] for stage in stages),
        backward_input=tuple(spans.get((s, Kind.BACKWARD_INPUT), 0.0) for s in stages),
        backward_weight=tuple(spans.get((s, Kind.BACKWARD_WEIGHT), whole[s]) for s in stages),
        there=none,
        back=none,
        held=ones,
        kept=ones,
    )


def update_seconds(
    durations: Durations, places: Sequence[Sequence[int]], share: float = 0.5
) -> float:
    """Of the slowest rank, all its stages together."""
    spans = {stage: durations[stage, Kind.UPDATE] for own in places for stage in own}
    return max(sum(float(np.quantile(spans[s], share)) for s in own) for own in places)
