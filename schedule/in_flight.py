"""How many minibatches a worker has in flight, between their forward and their backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from pipedream.schedule.action import StageLink


def warm_up(replicas: Sequence[int], stage: int) -> int:
    """Returns how many minibatches each replica of `stage` has in flight at least in 1F1B.

    The workers from this stage to the last, shared among the replicas of this stage; for stage 0 it
    is PipeDream's NOAM, the number of optimal active minibatches (SOSP 2019, section 3.2).
    """
    return -(-sum(replicas[stage:]) // replicas[stage])


@dataclass(frozen=True)
class StageTimes:
    """Says how long things take, in any one unit of time, where a minibatch leaves every `period`.

    `forward`, `backward` and `update` (the all-reduce with it) on one worker of each stage;
    `there` and `back`: an activation and its gradient on a link. A worker of a stage of r replicas
    is busy for no more than r periods with one minibatch.
    """

    period: float
    forward: Sequence[float]
    backward: Sequence[float]
    update: Sequence[float]
    there: Mapping[StageLink, float] = field(default_factory=dict)
    back: Mapping[StageLink, float] = field(default_factory=dict)


def useful_in_flight(
    replicas: Sequence[int],
    pace: StageTimes,
    links: Sequence[StageLink],
    synchronized: bool,
) -> tuple[int, ...]:
    """Returns how many minibatches each replica of a stage has in flight so that the pipeline keeps
    `pace`.

    In the steady state a worker of a stage of r replicas runs both passes once in r
    periods, always at the same moments of them. With d between the forward and the backward pass of
    a minibatch, floor(d / (r periods)) + 1 are in flight. From the last stage to the first: forward
    begins as late as the stages that read from it allow, and backward as soon as their gradients
    are there, then moved on to where it does not meet the next forward pass.

    If `synchronized`, the replicas of a stage wait for one another after each minibatch or some,
    and begin with r minibatches at once, when the last of them is there. Minibatch b then comes b
    mod r periods early at this stage and b mod q at the next one, of q replicas: forward waits for
    the largest b mod q - b mod r, which is q - g periods, g the greatest common divisor; backward
    likewise for r - g.

    For stages of one replica that take equally long, without messages, it is `warm_up`.
    """
    last = len(replicas) - 1
    begins, returns, counts = [0.0] * (last + 1), [0.0] * (last + 1), [1] * (last + 1)
    returns[last] = pace.forward[last]
    for stage in range(last - 1, -1, -1):
        here, takes = replicas[stage], pace.forward[stage]
        targets = [target for source, target in links if source == stage] or [stage + 1]
        latest, gradient = [], []
        for target in targets:
            there, link = replicas[target], (stage, target)
            shared = gcd(here, there)
            wait = (there - shared) * pace.period if synchronized else 0.0
            latest.append(begins[target] - wait - pace.there.get(link, 0.0) - takes)
            wait = (here - shared) * pace.period if synchronized else 0.0
            gradient.append(
                returns[target] + pace.backward[target] + pace.back.get(link, 0.0) + wait
            )
        begins[stage] = min(latest)
        turn = here * pace.period
        busy = pace.backward[stage] + pace.update[stage]
        counts[stage], between = _place(max(gradient) - begins[stage], takes, busy, turn)
        returns[stage] = begins[stage] + between
    return tuple(counts)


def _place(between: float, forward: float, backward: float, turn: float) -> tuple[int, float]:
    """Returns how many are in flight with at least `between` from a forward to its backward pass,
    and what that comes to if neither overlaps another; both come once in every `turn`.
    """
    slack = 1e-9 * turn
    whole = int((between + slack) // turn)
    moment = max(between - whole * turn, forward)
    if moment > turn - backward + slack and moment > forward + slack:
        whole, moment = whole + 1, forward
    return whole + 1, whole * turn + moment


def steady_in_flight(replicas: Sequence[int], synchronized: bool) -> tuple[int, ...]:
    """Returns `useful_in_flight` where workers are equally busy and messages take no time."""
    links = [(stage, stage + 1) for stage in range(len(replicas) - 1)]
    pace = StageTimes(period=2, forward=replicas, backward=replicas, update=[0] * len(replicas))
    return useful_in_flight(replicas, pace, links, synchronized)
