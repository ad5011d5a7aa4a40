"""The measured times of a model and of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipedream.graph.profile import (
    CompiledWay,
    DirectionFit,
    ProfiledGroups,
    ProfiledStretch,
    Quartiles,
)
from pipedream.profiler.timing.contention import TimedPass


@dataclass(frozen=True)
class Timing:
    """Seconds for one minibatch; backward is zero without gradients.

    `recomputed`: forward without saving for a backward pass; None if not measured.
    """

    forward: Quartiles
    backward: Quartiles
    recomputed: Quartiles | None = None

    @staticmethod
    def of(repeats: Sequence[tuple[float, float]]) -> Timing:
        """Returns the quartiles over repeats of (forward, backward)."""
        forward, backward = zip(*repeats, strict=True)
        return Timing(Quartiles.of(forward), Quartiles.of(backward))

    @staticmethod
    def nothing() -> Timing:
        """Returns the timing of an input: zero."""
        none = Quartiles.of([0.0])
        return Timing(none, none, none)


@dataclass(frozen=True)
class Times:
    """Timings of all nodes, and of the loss if there is one, with the factors of the fits applied.

    `warmup`, `repeats`: numbers of passes. `passes`: each repeat of the whole model. Without
    `stretches` and their fits, nodes were timed one by one. `saved_parts`: by node what is saved
    for its backward pass once it is compiled, in parts of what it saves eagerly; else empty.
    `backend`: torch.compile's that stages were measured with; `compared`: with the other ways,
    where the fastest was to be found; `refused`: why one could not be measured; `groups`: those
    that were tried.
    """

    nodes: Mapping[str, Timing]
    warmup: int
    repeats: int
    loss: Timing | None = None
    stretches: Sequence[ProfiledStretch] = ()
    forward: DirectionFit | None = None
    backward: DirectionFit | None = None
    passes: Sequence[TimedPass] = ()
    saved_parts: Mapping[str, float] = field(default_factory=dict)
    backend: str | None = None
    compared: Sequence[CompiledWay] = ()
    refused: str | None = None
    groups: Sequence[ProfiledGroups] = ()
