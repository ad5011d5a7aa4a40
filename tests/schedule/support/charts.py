"""What schedules and orders of passes look like, take and hold, for tests that compare them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from pipedream.schedule.action import Kind, show_worker
from pipedream.schedule.orders.passes import Pass, Round
from pipedream.schedule.orders.timing import Timing
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PassTimes, PipelineSpec


def chart(schedule: Schedule) -> str:
    """Returns the passes as text: a row for each worker, a column for each unit of time.

    For replicas (1, 1) and four minibatches, and for (1, 2) and three:

        0  F0 F1 .  B0 F2 B1 F3 B2 .  B3
        1  .  F0 B0 F1 B1 F2 B2 F3 B3

        0    F0 F1 F2 .  .  .  B0 B1 .  .  B2
        1    .  F0 -  B0 -  .  F2 -  B2 -
        1.1  .  .  F1 -  B1 -
    """
    width = max(4, len(str(schedule.minibatches)) + 2)
    lines = []
    for worker, steps in schedule.steps.items():
        takes = schedule.spec.replicas[worker[0]]
        cells = ["."] * (steps[-1].time + takes if steps else 0)
        for step in steps:
            cells[step.time : step.time + takes] = ["-"] * takes
            cells[step.time] = f"{step.kind}{step.minibatch}"
        label = show_worker(worker).ljust(width)
        lines.append((label + "".join(cell.ljust(width) for cell in cells)).rstrip())
    return "\n".join(lines)


def timed(spec: PipelineSpec, order: Round) -> list[list[tuple[float, float]]]:
    """Returns when each pass of each place begins and ends. Raises DeadlockError."""
    timing = Timing(spec, chain.from_iterable(order))
    begin, end = timing.play(timing.numbers(order), [0.0] * len(order))
    return [[(begin[n], end[n]) for n in sequence] for sequence in timing.numbers(order)]


def period(spec: PipelineSpec, order: Round) -> float:
    """Returns the seconds of a round, as `Timing.seconds_of_round`."""
    timing = Timing(spec, chain.from_iterable(order))
    return timing.seconds_of_round(timing.numbers(order))[0]


def held_bytes(order: Round, times: PassTimes) -> tuple[float, ...]:
    """Returns the most bytes that each place holds at once, of all its stages."""
    return tuple(max(_held(passes, times), default=0.0) for passes in order)


def _held(passes: Sequence[Pass], times: PassTimes) -> Iterator[float]:
    held_bytes = 0.0
    for stage, kind, _ in passes:
        if kind is Kind.FORWARD:
            held_bytes += times.held[stage]
        elif kind is Kind.BACKWARD_INPUT:
            held_bytes -= times.held[stage] - times.kept[stage]
        else:
            held_bytes -= times.kept[stage] if kind is Kind.BACKWARD_WEIGHT else times.held[stage]
        yield held_bytes
