"""How a simulated schedule went: its pace, and on demand its timeline and memory over time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipedream.graph.plan import DraftPlan, PlanT, Simulated, StageSeconds
from pipedream.graph.timeline import Event, Timeline
from pipedream.optimizer.cuts.planning_graph import Floats
from pipedream.optimizer.simulate.program import KINDS, Program
from pipedream.optimizer.simulate.workload import StageWork
from pipedream.schedule.action import (
    BACKWARDS,
    ENDS_BACKWARD,
    EXCHANGES,
    RECEIVES,
    Action,
    Kind,
    Versions,
    Worker,
)
from pipedream.schedule.steady_state import BUSY


@dataclass(frozen=True)
class Simulation:
    """`seconds_per_minibatch` and `bubble`, the share of the workers' time in which they neither
    compute nor update, are of the steady state, which begins with minibatch `steady_from`.

    `begin` and `end`: of each action of the `program`; `ranks`: its ranks, in its order; `works`:
    of its workers. `window`: when the steady state begins and ends, with so many `minibatches`.
    """

    seconds_per_minibatch: float
    bubble: float
    steady_from: int
    minibatches: int
    window: tuple[float, float]
    ranks: Sequence[int]
    program: Program
    works: Sequence[StageWork]
    begin: Floats
    end: Floats

    @cached_property
    def events(self) -> Timeline:
        """By rank."""
        return {rank: list(self._events(number)) for number, rank in enumerate(self.ranks)}

    @property
    def stages(self) -> tuple[StageSeconds, ...]:
        """What the workers of each stage do in the steady state, per minibatch."""
        program, (first, last) = self.program, self.window
        inside = np.minimum(self.end, last) - np.maximum(self.begin, first)
        stage_of = np.array([stage for stage, _ in program.workers])
        replicas = np.bincount(stage_of)
        seconds = np.zeros((len(replicas), len(KINDS)))
        np.add.at(seconds, (stage_of[program.worker], program.kind), np.maximum(inside, 0.0))
        seconds /= replicas[:, None] * self.minibatches

        def of(kinds: Collection[str]) -> list[float]:
            own: list[float] = (
                seconds[:, [KINDS.index(Kind(kind)) for kind in kinds]].sum(axis=1).tolist()
            )
            return own

        figures = zip(of(BUSY), of(RECEIVES), of(EXCHANGES), strict=True)
        return tuple(StageSeconds(compute=c, waiting=w, exchange=e) for c, w, e in figures)

    @cached_property
    def memory(self) -> Mapping[int, Sequence[tuple[float, float]]]:
        """By rank: (second, bytes held from then on)."""
        works = dict(zip(self.program.workers, self.works, strict=True))
        return {rank: _memory(events, works) for rank, events in self.events.items()}

    def rank_of(self, plan: DraftPlan) -> dict[int, int]:
        """By device of the plan the rank that was simulated for it: where stages are on meshes, all
        devices of a worker do what one rank does here.
        """
        found: dict[int, int] = {}
        for rank, actions in zip(self.ranks, self.program.actions, strict=True):
            for stage, replica in {(action.stage, action.replica) for action in actions}:
                found |= dict.fromkeys(plan.stages[stage].teams[replica].ranks, rank)
        return dict(sorted(found.items()))

    def _events(self, number: int) -> map[Event]:
        of_rank = slice(*self.program.begin[number : number + 2].tolist())
        actions = self.program.actions[number]
        return map(Event, actions, self.begin[of_rank].tolist(), self.end[of_rank].tolist())

    def noted_in(self, plan: PlanT) -> PlanT:
        """The plan with the figures of its simulation."""
        figures = Simulated(seconds_per_minibatch=self.seconds_per_minibatch, bubble=self.bubble)
        predicted = plan.predicted.model_copy(update={"simulated": figures})
        return plan.model_copy(update={"predicted": predicted})


class _Held:
    """What one worker holds; `halfway`: minibatches between the halves of their backward pass;
    `gradients`: any not yet used by an update.
    """

    def __init__(self, work: StageWork, actions: Sequence[Action]) -> None:
        self.work, self.versions = work, Versions(actions)
        self.in_flight, self.halfway, self.gradients, self.bytes = 0, 0, False, 0.0
        self.note()

    def note(self, backward: bool = False) -> None:
        older = len(self.versions.alive) - 1
        self.bytes = self.work.memory.at(
            older, self.in_flight, backward, self.gradients, self.halfway
        )


def _memory(
    events: Sequence[Event], works: Mapping[Worker, StageWork]
) -> list[tuple[float, float]]:
    """Returns what a rank holds over time: a minibatch until its backward pass is done."""
    actions: dict[Worker, list[Action]] = {}
    for action, _, _ in events:
        assert isinstance(action, Action)
        actions.setdefault((action.stage, action.replica), []).append(action)
    held = {worker: _Held(works[worker], own) for worker, own in actions.items()}
    curve: list[tuple[float, float]] = []

    def note(now: float) -> None:
        curve.append((now, sum(each.bytes for each in held.values())))

    note(0.0)
    for action, begin, end in events:
        assert isinstance(action, Action)
        mine = held[action.stage, action.replica]
        if action.kind is Kind.FORWARD:
            mine.in_flight += 1
            mine.note()
        elif action.kind in BACKWARDS:
            mine.note(backward=True)
            note(begin)
            mine.halfway += (action.kind is Kind.BACKWARD_INPUT) - (
                action.kind is Kind.BACKWARD_WEIGHT
            )
            if action.kind in ENDS_BACKWARD:
                mine.in_flight -= 1
                mine.versions.gone_backward(action.version)
                mine.gradients = True
            mine.note()
            begin = end
        elif action.kind is Kind.UPDATE:
            mine.versions.updated()
            mine.note()
            note(begin)
            mine.gradients = False
            mine.note()
            begin = end
        else:
            continue
        note(begin)
    note(max((end for _, _, end in events), default=0.0))
    return curve
