"""Orders of passes that the project does not ship, by hand: each is a generator, nothing else.

`register` makes them known, so that pd-train trains plans that name them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from schedules import assigned

from pipedream.graph.plan import RankAssignment, workers_by_rank
from pipedream.schedule.action import Action, Kind, StageLink, Worker
from pipedream.schedule.generate import Step
from pipedream.schedule.schedule import ORDERS, Passes, Schedule, write_actions
from pipedream.schedule.spec import PipelineSpec

F, B, BI, BW = PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def interleaved_passes(
    schedule: Schedule, workers: Sequence[Worker]
) -> Iterator[tuple[Worker, Step]]:
    """1F1B with a flush where rank r of n has the stages r, r + n ...: Narayanan et al., "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
    section 2.2. Microbatches go in groups of n: all of a group through one stage of a rank, then
    through its next one. There are whole groups and rounds only.
    """
    stages, microbatches = len(schedule.spec.replicas), schedule.spec.microbatches
    own = [stage for stage, _ in workers]
    ranks, chunks = stages // len(own), len(own)
    assert own == list(range(own[0], stages, ranks)), "each rank has every so many-th stage"
    assert microbatches % ranks == schedule.minibatches % microbatches == 0, "whole groups only"

    def order(own: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(stage, microbatch) of all passes of a round in one direction."""
        for group in range(0, microbatches, ranks):
            for stage in own:
                for b in range(ranks):
                    yield stage, group + b

    total = microbatches * chunks
    warm_up = min(2 * (ranks - own[0] - 1) + (chunks - 1) * ranks, total)
    for number in range(schedule.minibatches // microbatches):
        coming = {F: order(own), B: order(own[::-1])}
        for kind in [F] * warm_up + [F, B] * (total - warm_up) + [B] * warm_up:
            stage, b = next(coming[kind])
            yield (stage, 0), Step(0, kind, number * microbatches + b, number)


def zero_bubble_passes(
    schedule: Schedule, workers: Sequence[Worker]
) -> Iterator[tuple[Worker, Step]]:
    """1F1B with a flush and backward passes in two halves, in the manner of ZB-H1: Qi, Wan, Huang,
    Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2. The second half of a microbatch
    comes as many backward passes later as there are stages before, so that all stages have as many
    in flight. The first stage sends no gradients, so its backward passes are whole.
    """
    ((stage, replica),) = workers
    stages, microbatches = len(schedule.spec.replicas), schedule.spec.microbatches
    for number, first in enumerate(range(0, schedule.minibatches, microbatches)):
        count = min(microbatches, schedule.minibatches - first)
        warm_up = min(stages - stage, count)
        kinds = [(F, b) for b in range(warm_up)]
        for b in range(count):
            kinds += [(BI if stage else B, b)]
            kinds += [(BW, b - stage)] if stage and b >= stage else []
            kinds += [(F, b + warm_up)] if b + warm_up < count else []
        kinds += [(BW, b) for b in range(max(0, count - stage), count)] if stage else []
        for kind, b in kinds:
            yield (stage, replica), Step(0, kind, first + b, number)


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
    ORDERS["interleaved"] = interleaved_passes
    ORDERS["zero-bubble"] = zero_bubble_passes
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
    pipeline = _flush("interleaved", stages, minibatches, microbatches, links)
    return Orders.made(pipeline, [[stage % ranks] for stage in range(stages)])


def zero_bubble(
    stages: int, minibatches: int, microbatches: int, links: Sequence[StageLink] = ()
) -> Orders:
    pipeline = _flush("zero-bubble", stages, minibatches, microbatches, links)
    return Orders.made(pipeline, [[stage] for stage in range(stages)])


def with_norm(orders: Orders) -> Orders:
    """The same passes, with one norm of all gradients before each update."""
    made = Schedule(replace(orders.schedule.spec, joint_norm=True), orders.schedule.minibatches)
    return Orders.made(made, orders.ranks)


def halved(made: Schedule) -> Orders:
    first = [sum(made.spec.replicas[:stage]) for stage in range(len(made.spec.replicas))]
    ranks = [range(f, f + r) for f, r in zip(first, made.spec.replicas, strict=True)]
    return Orders.made(Schedule(replace(made.spec, order="halved"), made.minibatches), ranks)


def _flush(
    order: str, stages: int, minibatches: int, microbatches: int, links: Sequence[StageLink]
) -> Schedule:
    chain = tuple((stage, stage + 1) for stage in range(stages - 1))
    spec = PipelineSpec(
        "flush",
        (1,) * stages,
        tuple(sorted(links)) or chain,
        microbatches,
        max_in_flight=(max(stages, microbatches),) * stages,
        order=order,
    )
    return Schedule(spec, minibatches)
