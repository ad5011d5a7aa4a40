"""What each rank does, in the project's orders and in two that it does not ship.

`register` makes those known, so that pd-train trains plans that name them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from schedules import assigned

from pipedream.graph.plan import RankAssignment, workers_by_rank
from pipedream.schedule.action import Action, Kind, StageLink, Worker
from pipedream.schedule.generate import Step
from pipedream.schedule.orders.literature import loop
from pipedream.schedule.schedule import ORDERS, Passes, Schedule, write_actions
from pipedream.schedule.spec import PassTimes, PipelineSpec

F, B, BI, BW = PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def halved_passes(schedule: Schedule, workers: Sequence[Worker]) -> Iterator[tuple[Worker, Step]]:
    """1F1B with every backward pass in two halves, the second once the first has sent."""
    (worker,) = workers
    for step in schedule.steps[worker]:
        for kind in (BI, BW) if step.kind is B else (step.kind,):
            yield worker, step._replace(kind=kind)


def merged_passes(schedule: Schedule, workers: Sequence[Worker]) -> Passes:
    """What the list scheduler has each worker do, in the order of time, on any ranks."""
    passes = [(step, worker) for worker in workers for step in schedule.steps[worker]]
    return ((worker, step) for step, worker in sorted(passes, key=lambda each: each[0].time))


def register() -> None:
    """Makes the orders known in this process."""
    ORDERS["halved"] = halved_passes
    ORDERS["merged"] = merged_passes


register()


@dataclass(frozen=True)
class Orders:
    """What each rank does; `ranks[stage][replica]` is the rank of a worker."""

    schedule: Schedule
    ranks: Sequence[Sequence[int]]
    actions: dict[int, list[Action]]

    @staticmethod
    def of(
        schedule: Schedule, ranks: Sequence[Sequence[int]], passes: Callable[[int], Passes]
    ) -> Orders:
        """Of any passes of each rank."""
        workers = workers_by_rank(assigned(ranks))
        actions = {rank: write_actions(schedule, w, passes(rank)) for rank, w in workers.items()}
        return Orders(schedule, ranks, actions)

    @staticmethod
    def made(schedule: Schedule, ranks: Sequence[Sequence[int]]) -> Orders:
        """Of the schedule's own order."""
        workers = workers_by_rank(assigned(ranks))
        return Orders(schedule, ranks, {rank: schedule.actions(*w) for rank, w in workers.items()})

    @property
    def assignment(self) -> RankAssignment:
        return assigned(self.ranks)

    @property
    def shown(self) -> str:
        """The passes of each rank, without the messages and updates around them."""
        return "\n".join(
            f"{rank}  "
            + " ".join(f"{a.stage}{a.kind}{a.minibatch}" for a in actions if a.kind in PASSES)
            for rank, actions in sorted(self.actions.items())
        )


def interleaved(
    ranks: int, stages: int, minibatches: int, microbatches: int, links: Sequence[StageLink] = ()
) -> Orders:
    return of_rounds("interleaved", loop(ranks, stages // ranks), minibatches, microbatches, links)


def zero_bubble(
    stages: int, minibatches: int, microbatches: int, links: Sequence[StageLink] = ()
) -> Orders:
    return of_rounds("zb-h1", tuple(range(stages)), minibatches, microbatches, links)


def of_rounds(
    order: str,
    rank_map: tuple[int, ...],
    minibatches: int,
    microbatches: int,
    links: Sequence[StageLink] = (),
    replicas: int = 1,
    times: PassTimes | None = None,
) -> Orders:
    """An order of the project's own; replica k of a stage at place p is on rank replicas p + k."""
    stages = len(rank_map)
    chain = tuple((stage, stage + 1) for stage in range(stages - 1))
    spec = PipelineSpec(
        "flush",
        (replicas,) * stages,
        tuple(sorted(links)) or chain,
        microbatches,
        order=order,
        rank_map=rank_map,
        times=times,
    )
    ranks = [[replicas * place + k for k in range(replicas)] for place in rank_map]
    return Orders.made(Schedule(spec, minibatches), ranks)


def with_norm(orders: Orders) -> Orders:
    """The same passes, with one norm of all gradients before each update."""
    made = Schedule(replace(orders.schedule.spec, joint_norm=True), orders.schedule.minibatches)
    return Orders.made(made, orders.ranks)


def halved(made: Schedule) -> Orders:
    first = [sum(made.spec.replicas[:stage]) for stage in range(len(made.spec.replicas))]
    ranks = [range(f, f + r) for f, r in zip(first, made.spec.replicas, strict=True)]
    return Orders.made(Schedule(replace(made.spec, order="halved"), made.minibatches), ranks)
