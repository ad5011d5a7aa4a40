"""The measured times of a model, of its nodes and of its stretches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipedream.graph.profile import Quartiles
from pipedream.profiler.timing.fit import Compared, StretchFit


@dataclass(frozen=True)
class Timing:
    """Seconds for one minibatch; backward is zero without gradients.

    `recomputed`: forward without saving for a backward pass; None if not measured.
    """

    forward: Quartiles
    backward: Quartiles
    recomputed: Quartiles | None = None

    @staticmethod
    def nothing() -> Timing:
        """The timing of an input: zero."""
        none = Quartiles(median=0.0, lower=0.0, upper=0.0)
        return Timing(none, none, none)


@dataclass(frozen=True)
class StretchTimes:
    """Medians of a stretch: the sum over its nodes before the fit, and measured as a whole."""

    nodes: Sequence[str]
    forward: Compared
    backward: Compared


@dataclass(frozen=True)
class Times:
    """Timings of all nodes, and of the loss if there is one, with the factors of the fits applied.

    `warmup`, `repeats`: numbers of passes. `pass_seconds`: each repeat of the whole model. Without
    `stretches`, nodes were timed one by one.
    """

    nodes: Mapping[str, Timing]
    loss: Timing | None
    stretches: Sequence[StretchTimes]
    forward: StretchFit
    backward: StretchFit
    warmup: int
    repeats: int
    pass_seconds: Sequence[float] = ()
