"""A schedule drawn as text."""

from __future__ import annotations

from pipedream.schedule.action import show_worker
from pipedream.schedule.schedule import Schedule


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
    for (stage, replica), steps in schedule.steps.items():
        takes = schedule.spec.replicas[stage]
        cells = ["."] * (steps[-1].time + takes if steps else 0)
        for step in steps:
            cells[step.time : step.time + takes] = ["-"] * takes
            cells[step.time] = f"{step.kind}{step.minibatch}"
        label = show_worker((stage, replica)).ljust(width)
        lines.append((label + "".join(cell.ljust(width) for cell in cells)).rstrip())
    return "\n".join(lines)
