"""Stretches of nodes that run as stages do, timed without marks; and what compiling them gains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from pipedream.graph.profile import Passes, ProfiledStretch
from pipedream.profiler.stretches.division import Compared
from pipedream.profiler.timing.passes import LOSS, Loss, Stretch, Turn

NodeSeconds: TypeAlias = Mapping[str, float]
"""Seconds of each node and of the loss."""

Way: TypeAlias = str | None
"""torch.compile's backend, after BY_GROUPS if by groups; None where it is not compiled."""

BothPasses: TypeAlias = tuple[NodeSeconds, NodeSeconds]
"""Forward and backward."""

WORTH_COMPILING = 0.99
"""Of the seconds of passes that are not compiled: else stages stay as they are."""
_AS_FAST = 1.01
"""Times the seconds of the fastest way: groups that repeat are compiled in less time."""
_OFF = 0.02, 0.2
"""How far gradients of compiled passes may be from those of the others, all together, in parts of
their norm: in single precision or more, and in less. Rounding alone, which a ResNet of pictures of
32 x 32 magnifies, was seen to make 0.006.
"""


@dataclass(frozen=True)
class TimedStretch:
    """A stretch of nodes; `names`: these, and the loss if it ends in that; `alone`: the number of
    each repeat, and the seconds of its passes without marks.
    """

    nodes: Sequence[str]
    names: Sequence[str]
    stretch: Stretch
    alone: list[tuple[int, float, float]] = field(default_factory=list)

    def compared(self, turns: Sequence[BothPasses]) -> tuple[Compared, Compared]:
        """Both passes beside the sums over its nodes in `turns`, by repeat: the medians."""
        forward, backward = (
            Compared.median(
                [
                    Compared(sum(turns[number][which][name] for name in self.names), own[which])
                    for number, *own in self.alone
                ]
            )
            for which in (0, 1)
        )
        return forward, backward

    def profiled(self, forward: Compared, backward: Compared) -> ProfiledStretch:
        return ProfiledStretch(
            first=self.nodes[0],
            last=self.nodes[-1],
            nodes=len(self.nodes),
            forward=Passes(summed=forward.summed, measured=forward.measured),
            backward=Passes(summed=backward.summed, measured=backward.measured),
        )


Division: TypeAlias = Sequence[TimedStretch]
"""All nodes, in stretches that follow each other."""


def run(
    division: Division, inputs: Mapping[str, Tensor], loss: Loss | None
) -> Iterator[tuple[TimedStretch, Turn]]:
    """Runs one stretch after the other on what those before it gave."""
    values = dict(inputs)
    for timed in division:
        turn = timed.stretch.run(values, loss if LOSS in timed.names else None)
        values.update(turn.values)
        yield timed, turn


def gains(division: Division, turns: Sequence[BothPasses]) -> dict[str, tuple[float, float]]:
    """Returns by node, and for the loss, what part of its time each pass takes in its stretch."""
    found: dict[str, tuple[float, float]] = {}
    for timed in division:
        if timed.alone:
            forward, backward = timed.compared(turns)
            found |= dict.fromkeys(timed.names, (_part(forward), _part(backward)))
    return found


def _part(compared: Compared) -> float:
    return compared.measured / compared.summed if compared.summed > 0 else 1.0


def taking(
    seconds: NodeSeconds, parts: Mapping[str, tuple[float, float]], which: int
) -> NodeSeconds:
    """Returns the seconds of a pass, 0 for forward or 1 for backward, with these gains."""
    return {name: own * parts.get(name, (1.0, 1.0))[which] for name, own in seconds.items()}


def seconds_of(wholes: Mapping[Way, Division], turns: Sequence[BothPasses]) -> Mapping[Way, float]:
    """Returns what passes of the whole model take, each way. Only ratios within a repeat are taken
    from each: the machine may have been slower in some.
    """
    compared = {
        way: [own for timed in whole for own in timed.compared(turns)]
        for way, whole in wholes.items()
    }
    summed = sum(own.summed for own in compared[None])
    return {way: summed * _ratio(own) for way, own in compared.items()}


def _ratio(compared: Sequence[Compared]) -> float:
    return sum(own.measured for own in compared) / sum(own.summed for own in compared)


def fastest(seconds: Mapping[Way, float]) -> Way:
    """Returns the way to take: later ones, which are compiled sooner, if as fast."""
    made = {way: own for way, own in seconds.items() if way is not None}
    if min(made.values(), default=math.inf) >= seconds[None] * WORTH_COMPILING:
        return None
    return [way for way, own in made.items() if own <= min(made.values()) * _AS_FAST][-1]


def saved_parts(
    small: Sequence[tuple[TimedStretch, int, int]], large: tuple[int, int]
) -> dict[str, float]:
    """Returns by node what its compiled stretch saves, in parts of what it saves eagerly; all
    together what the whole model does. `small`, `large`: of stretches and of the whole model the
    bytes saved eagerly and compiled.
    """
    before, after = sum(eager for _, eager, _ in small), sum(made for *_, made in small)
    factor = large[1] / large[0] * before / after if large[0] and after else 1.0
    return {
        name: made / eager * factor if eager else 1.0
        for timed, eager, made in small
        for name in timed.nodes
    }


def wrong_gradient(eager: Stretch, made: Stretch, values: Mapping[str, Tensor]) -> str | None:
    """Returns the parameter or input whose gradient is furthest off, if the compiled stretch has
    other gradients than the same nodes as they are; else None.
    """
    both = []
    for each in (eager, made):
        torch.manual_seed(0)  # of what is drawn
        both.append(each.gradients(values))
    return furthest_off(*both)


def furthest_off(right: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """Returns the name of the gradient that is furthest off, if that is more than rounding."""
    errors = {name: float((own - found[name]).norm()) for name, own in right.items()}
    size = math.hypot(*(float(own.norm()) for own in right.values()))
    low = any(own.dtype.itemsize < 4 for own in right.values())
    if math.hypot(*errors.values()) <= _OFF[low] * size:
        return None
    return max(errors, key=errors.__getitem__)
