"""The last backward pass of a round, beside which the sums of its gradients go.

A sum keeps the ranks busy for a share of its time, so a pass beside it does the rest of that time's
work: it takes longer, the more so the more of the sums it hides. If the ranks are busy for longer
than the sum takes, so does the sum beside a pass, which stands still meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from pipedream.optimizer.cost.network import Network, Transfer
from pipedream.optimizer.simulate.workload import StageWork

Part: TypeAlias = tuple[Transfer, float]
"""How a part goes over an idle network, and the share of the backward pass before it."""


def gather_seconds(work: StageWork, ranks: Sequence[int], network: Network) -> float:
    """Seconds after an update until the ranks have each other's parts of the parameters; 0 where
    each updates all. They wait for it, since the next pass needs the parameters.
    """
    return network.all_reduce(ranks, work.gathered_bytes).total if work.gathered_bytes else 0.0


class PassWithSums(NamedTuple):
    """The seconds of the pass, with the work of the sums that it hides; for each part the share of
    these seconds after which it begins; and how long after the pass the last of the sums is there.
    """

    seconds: float
    begins: tuple[float, ...]
    over: float


def parts_of(work: StageWork, ranks: Sequence[int], network: Network) -> list[Part]:
    """Of the sum of a stage with this work over the ranks."""
    return [(network.all_reduce(ranks, amount), after) for amount, after in work.sums]


def pass_with_sums(backward_seconds: float, parts: Iterable[Part]) -> PassWithSums:
    """The pass that takes so many seconds alone. The parts go one after the other."""
    now = done = 0.0  # seconds, and seconds of the pass alone
    ends: float | None = None
    begins, there = [], 0.0
    for transfer, after in parts:
        ready = after * backward_seconds
        if done < ready:
            now, done = now + ready - done, ready
        begins.append(now)
        left, free = backward_seconds - done, max(0.0, transfer.seconds - transfer.busy)
        if left <= free and ends is None:
            ends = now + (left / free * transfer.seconds if left else 0.0)
        done = min(backward_seconds, done + free)
        now += transfer.seconds + min(left, max(0.0, transfer.busy - transfer.seconds))
        there = max(there, now + transfer.latency)
    seconds = now + backward_seconds - done if ends is None else ends
    shares = (min(1.0, begin / seconds) if seconds else 1.0 for begin in begins)
    return PassWithSums(seconds, tuple(shares), max(0.0, there - seconds))
