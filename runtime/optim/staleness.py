"""How old the weights of a minibatch are when its gradient changes them. Pure, as the schedule.

A minibatch that runs on version v and belongs to round t of a stage makes its version t + 1 out of
version t: t - v other updates come between, the delay. For n stages of one replica, numbered from
0, weight stashing has

    minibatch     0  1  2  3  4  5
    stage 0       0  1  2  2  2  2      n = 3
    stage 1       0  1  1  1  1  1
    stage 2       0  0  0  0  0  0

that is n - 1 - s at stage s once the pipeline is full, and again from 0 after it was drained.
"""

from __future__ import annotations

from pipedream.schedule.action import Kind
from pipedream.schedule.schedule import Schedule


def delays(schedule: Schedule, stage: int) -> dict[int, int]:
    """The delay of each minibatch at `stage`, in updates of the stage, for all its replicas."""
    size = schedule.policy.round_size(stage)
    return {
        step.minibatch: step.minibatch // size - step.version
        for replica in range(schedule.spec.replicas[stage])
        for step in schedule.steps[stage, replica]
        if step.kind is Kind.FORWARD
    }
