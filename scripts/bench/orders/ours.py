"""Rounds of pd-train's engine, under one rank map."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from divided import BENCH, MODELS
from efficiency import Same
from torch import Tensor

from pipedream.comm.rank_info import RankInfo
from pipedream.comm.stage_groups import StageGroups
from pipedream.comm.transport import Transport
from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.graph.plan import Plan
from pipedream.graph.timeline import Event
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.engine.executor import Executor
from pipedream.runtime.local.local_model import LocalModel
from pipedream.runtime.local.local_stage import LocalStage
from pipedream.runtime.optim.rates import LossSum
from pipedream.runtime.optim.stepping import Stepping
from pipedream.runtime.optim.weights import Weights
from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.run.job import Job
from pipedream.runtime.run.training_segment import TrainingSegment
from pipedream.runtime.stages.partition import links
from pipedream.schedule.action import BACKWARDS, RECEIVES, Kind, StageLink
from pipedream.schedule.orders.interleaved import interleaved
from pipedream.schedule.orders.named import round_of
from pipedream.schedule.orders.passes import Pass, Round, needs
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PassTimes, PipelineSpec

Did = tuple[int, int, Kind, int]
"""(turn, stage, kind, minibatch): a pass, the sends after it, or an update and the first minibatch
of its round.
"""

Message = tuple[int, int, int, bool, int]
"""(turn, source stage, target stage, whether it is a gradient, minibatch)."""


@dataclass
class Clocked:
    """What a rank has done in the turns of an order. `spans`: seconds of passes, sends and updates;
    `made`: when the pass of each message ended; `awaited`: when the stage that receives it began
    and ended to wait for it.
    """

    spans: dict[Did, float] = field(default_factory=dict)
    made: dict[Message, float] = field(default_factory=dict)
    awaited: dict[Message, tuple[float, float]] = field(default_factory=dict)
    turn: int = 0

    def add(self, events: Iterable[Event]) -> None:
        """Those of a turn."""
        self.turn += 1
        ends: dict[tuple[int, bool, int], float] = {}
        for action, begin, end in events:
            kind, stage, minibatch = Kind(action.kind), action.stage, action.minibatch
            is_gradient = kind in (*_BEGINS_BACKWARD, *_OF_GRADIENTS)
            if kind in (Kind.FORWARD, Kind.UPDATE, *BACKWARDS):
                self.spans[self.turn, stage, kind, minibatch] = end - begin
            if kind in (Kind.FORWARD, *_BEGINS_BACKWARD):
                ends[stage, is_gradient, minibatch] = end
            elif action.peer is not None:
                source, target = stage, action.peer[0]
                if kind in RECEIVES:
                    message = self.turn, target, source, is_gradient, minibatch
                    self.awaited[message] = begin, end
                else:
                    message = self.turn, source, target, is_gradient, minibatch
                    self.made[message] = ends[stage, is_gradient, minibatch]
                    sends = self.turn, stage, kind, minibatch
                    self.spans[sends] = self.spans.get(sends, 0.0) + end - begin

    def join(self, other: Clocked) -> None:
        """Adds what another rank has done in the same turns."""
        self.spans.update(other.spans)
        self.made.update(other.made)
        self.awaited.update(other.awaited)

    def of(self, stage: int, kind: Kind) -> list[float]:
        """Seconds of all these passes, or updates, of a stage."""
        return [seconds for (_, s, k, _), seconds in self.spans.items() if (s, k) == (stage, kind)]

    def delay(self, link: StageLink, is_gradient: bool, share: float) -> float:
        """Seconds from the end of a pass until its message has come, of those messages that the
        other side waited for by then.
        """
        source, target = reversed(link) if is_gradient else link
        delays = [
            self.awaited[message][1] - made
            for message, made in self.made.items()
            if message[1:4] == (source, target, is_gradient)
            and message in self.awaited
            and self.awaited[message][0] < made
        ]
        return float(np.quantile(delays, share)) if delays else 0.0


SENDS_AFTER = {
    Kind.FORWARD: Kind.SEND_ACTIVATION,
    Kind.BACKWARD: Kind.SEND_GRADIENT,
    Kind.BACKWARD_INPUT: Kind.SEND_GRADIENT,
}
_BEGINS_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_OF_GRADIENTS = (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT)


class Ours:
    """This rank's stages of a model. Made by all ranks at the same time."""

    def __init__(self, name: str, rank: int, folder: Path, plan: Plan) -> None:
        job = Job(plan, MODELS[name].run, BENCH, folder / f"{plan.order}", schedule="flush")
        self.local = LocalModel(job, RankInfo(rank, 2, rank, 2, "127.0.0.1", 0))
        self.batch = self.local.examples.epoch(1).batch(0)
        self.transport = Transport(torch.device("cpu"), "gloo")
        self.clocked: dict[str, Clocked] = defaultdict(Clocked)
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
        self.clocked[spec.order].add(engine.times.events)
        ends = {a.version: end for a, _, end in engine.times.events if a.kind is Kind.UPDATE}
        return [after - before for before, after in pairwise(ends.values())]

    def _executor(self, stage: LocalStage) -> Executor:
        losses = LossSum(lambda tensor: None, torch.device("cpu"))
        steppings = {stage.stage: stage.make_stepping({}, lambda _: None)}
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

    def of_all_stages(self, order: str) -> Clocked:
        """Of both ranks; both call it."""
        ranks = [Clocked(), Clocked()]
        dist.all_gather_object(ranks, self.clocked[order])
        ranks[0].join(ranks[1])
        return ranks[0]


def pass_times(clocked: Clocked, spec: PipelineSpec, share: float = 0.5) -> PassTimes:
    """Medians, or what `share` of the passes and messages do not exceed. A stage with whole
    backward passes alone sends no gradients: in halves it would do all of them in the second.
    """
    stages = range(len(spec.replicas))

    def seconds(kind: Kind) -> list[float | None]:
        spans = [clocked.of(stage, kind) for stage in stages]
        return [float(np.quantile(each, share)) if each else None for each in spans]

    whole = seconds(Kind.BACKWARD)
    weight = [w or b for w, b in zip(seconds(Kind.BACKWARD_WEIGHT), whole, strict=True)]
    ones = (1.0,) * len(stages)
    there, back = (
        tuple(clocked.delay(link, is_gradient, share) for link in spec.links)
        for is_gradient in (False, True)
    )
    return PassTimes(
        forward=tuple(each or 0.0 for each in seconds(Kind.FORWARD)),
        backward_input=tuple(each or 0.0 for each in seconds(Kind.BACKWARD_INPUT)),
        backward_weight=tuple(each or 0.0 for each in weight),
        there=there,
        back=back,
        held=ones,
        kept=ones,
    )


def played(clocked: Clocked, spec: PipelineSpec, turn: int, rounds: int) -> list[float]:
    """Seconds from the end of each round of a turn to that of the next, on the place where that is
    longest, if each pass, send and update takes as long as it took then, each message what those of
    its link take by the median, and nothing else takes time.
    """
    timed, m = replace(spec, times=pass_times(clocked, spec)), spec.microbatches
    left = {place: deque(_of_rounds(spec, own, rounds)) for place, own in enumerate(_round(spec))}
    now, over = dict.fromkeys(left, 0.0), dict[Pass, float]()
    ends: dict[int, list[float]] = {place: [] for place in left}
    while any(left.values()):
        for place, own in left.items():
            while own:
                stage, kind, number = each = own[0]
                if kind is not Kind.UPDATE:
                    ready = [over.get(need, inf) + delay for need, delay in needs(timed, each)]
                    if inf in ready:
                        break
                    now[place] = max([now[place], *ready])
                over[each] = now[place] = now[place] + clocked.spans[turn, stage, kind, number]
                if kind in SENDS_AFTER:
                    sends = turn, stage, SENDS_AFTER[kind], number
                    now[place] += clocked.spans.get(sends, 0.0)
                if kind is Kind.BACKWARD:
                    over[each._replace(kind=Kind.BACKWARD_INPUT)] = over[each]
                own.popleft()
                if not own or (own[0].microbatch // m > number // m and kind is Kind.UPDATE):
                    ends[place].append(now[place])
    spans = [[after - before for before, after in pairwise(own)] for own in ends.values()]
    return [max(of_round) for of_round in zip(*spans, strict=True)]


def _of_rounds(spec: PipelineSpec, own: Sequence[Pass], rounds: int) -> Iterator[Pass]:
    """The passes and updates of a place."""
    for first in range(0, rounds * spec.microbatches, spec.microbatches):
        for each in own:
            yield each._replace(microbatch=first + each.microbatch)
        for stage in dict.fromkeys(each.stage for each in own):
            yield Pass(stage, Kind.UPDATE, first)


def _round(spec: PipelineSpec) -> Round:
    """1F1B is interleaved 1F1B with one stage on each rank."""
    one_each = spec.order == DEFAULT_ORDER
    return (interleaved if one_each else round_of)(spec, spec.microbatches)


def update_seconds(clocked: Clocked, places: Sequence[Sequence[int]], share: float = 0.5) -> float:
    """Of the slowest rank, all its stages together."""
    spans = {stage: clocked.of(stage, Kind.UPDATE) for own in places for stage in own}
    return max(sum(float(np.quantile(spans[s], share)) for s in own) for own in places)
