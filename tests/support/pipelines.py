"""Two schedules that pd-train does not have, by hand: each is a generator of passes, nothing else.

Both empty the pipeline after every round of so many microbatches, as flush does, and learn what it
learns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipedream.schedule.action import Action, Kind, Link, Worker
from pipedream.schedule.generate import Step
from pipedream.schedule.schedule import Schedule, write_actions
from pipedream.schedule.spec import PipelineSpec

Passes = Iterator[tuple[Worker, Step]]

F, B, BI, BW = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


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
        workers: dict[int, list[Worker]] = {}
        for stage, replica in schedule.workers:
            workers.setdefault(ranks[stage][replica], []).append((stage, replica))
        actions = {
            rank: write_actions(schedule, own, passes(rank)) for rank, own in workers.items()
        }
        return Orders(schedule, ranks, actions)

    @property
    def shown(self) -> str:
        """The passes of each rank, without the messages and updates around them."""
        return "\n".join(
            f"{rank}  "
            + " ".join(f"{a.stage}{a.kind}{a.minibatch}" for a in actions if a.kind in PASSES)
            for rank, actions in sorted(self.actions.items())
        )


PASSES = (F, B, BI, BW)


def interleaved(
    ranks: int, stages: int, minibatches: int, microbatches: int, links: Sequence[Link] = ()
) -> Orders:
    """1F1B with a flush where rank r has the stages r, r + ranks ...: Narayanan et al., "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
    section 2.2. Microbatches go in groups of `ranks`: all of a group through one stage of a rank,
    then through its next one. There are whole groups and rounds only.
    """
    assert stages % ranks == microbatches % ranks == minibatches % microbatches == 0
    chunks = stages // ranks

    def order(rank: int, own: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(stage, microbatch) of all passes of a round in one direction."""
        for group in range(0, microbatches, ranks):
            for stage in own:
                for b in range(ranks):
                    yield stage, group + b

    def passes(rank: int) -> Passes:
        own = range(rank, stages, ranks)
        total = microbatches * chunks
        warm_up = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
        for number in range(minibatches // microbatches):
            coming = {F: order(rank, own), B: order(rank, own[::-1])}
            for kind in [F] * warm_up + [F, B] * (total - warm_up) + [B] * warm_up:
                stage, b = next(coming[kind])
                yield (stage, 0), Step(0, kind, number * microbatches + b, number)

    pipeline = _flush(stages, minibatches, microbatches, links)
    return Orders.of(pipeline, [[stage % ranks] for stage in range(stages)], passes)


def zero_bubble(
    stages: int, minibatches: int, microbatches: int, links: Sequence[Link] = ()
) -> Orders:
    """1F1B with a flush and backward passes in two halves, in the manner of ZB-H1: Qi, Wan, Huang,
    Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2. The second half of a microbatch
    comes as many backward passes later as there are stages before, so that all stages have as many
    in flight. The first stage sends no gradients, so its backward passes are whole.
    """

    def passes(stage: int) -> Passes:
        for number, first in enumerate(range(0, minibatches, microbatches)):
            count = min(microbatches, minibatches - first)
            warm_up = min(stages - stage, count)
            kinds = [(F, b) for b in range(warm_up)]
            for b in range(count):
                kinds += [(BI if stage else B, b)]
                kinds += [(BW, b - stage)] if stage and b >= stage else []
                kinds += [(F, b + warm_up)] if b + warm_up < count else []
            kinds += [(BW, b) for b in range(max(0, count - stage), count)]
            for kind, b in kinds:
                yield (stage, 0), Step(0, kind, first + b, number)

    pipeline = _flush(stages, minibatches, microbatches, links)
    return Orders.of(pipeline, [[stage] for stage in range(stages)], passes)


def halved(made: Schedule) -> Orders:
    """`made` with every backward pass in two halves, the second once the first has sent."""
    orders = [
        [rank + sum(made.spec.replicas[:stage]) for rank in range(count)]
        for stage, count in enumerate(made.spec.replicas)
    ]

    def passes(rank: int) -> Passes:
        (worker,) = (w for w in made.workers if orders[w[0]][w[1]] == rank)
        for step in made.steps[worker]:
            for kind in (BI, BW) if step.kind is B else (step.kind,):
                yield worker, step._replace(kind=kind)

    return Orders.of(made, orders, passes)


def _flush(stages: int, minibatches: int, microbatches: int, links: Sequence[Link]) -> Schedule:
    chain = tuple((stage, stage + 1) for stage in range(stages - 1))
    spec = PipelineSpec(
        "flush",
        (1,) * stages,
        tuple(sorted(links)) or chain,
        microbatches,
        max_in_flight=(max(stages, microbatches),) * stages,
    )
    return Schedule(spec, minibatches)
