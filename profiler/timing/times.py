"""What was measured of the time of a model, by whichever way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipedream.graph.profile import Quartiles
from pipedream.profiler.timing.fit import Compared, StretchFit


@dataclass(frozen=True)
class Timing:
    """What something takes for one minibatch; backward is zero where no gradient flows.

    `recomputed`: forward keeping nothing for a backward pass; None where that was not measured.
    """

    forward: Quartiles
    backward: Quartiles
    recomputed: Quartiles | None = None

    @staticmethod
    def nothing() -> Timing:
        """Of an input."""
        none = Quartiles(median=0.0, lower=0.0, upper=0.0)
        return Timing(none, none, none)


@dataclass(frozen=True)
class StretchTimes:
    """Medians of a stretch of nodes: summed over them, before any fit, and measured as a whole."""

    nodes: Sequence[str]
    forward: Compared
    backward: Compared


@dataclass(frozen=True)
class Times:
    """Timings of all nodes, and of the loss where there is one; `warmup` and `repeats` passes, and
    what each of the latter took where it was a pass of the whole model.

    The factors of the fits are in the timings. Without `stretches` nodes were timed one by one.
    """

    nodes: Mapping[str, Timing]
    loss: Timing | None
    stretches: Sequence[StretchTimes]
    forward: StretchFit
    backward: StretchFit
    warmup: int
    repeats: int
    pass_seconds: Sequence[float] = ()
