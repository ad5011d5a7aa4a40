"""What training takes beside the layers, as pd-profile measured it: a part of profile.json."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pipedream.graph.artifact import read_artifact


@dataclass(frozen=True)
class Upkeep:
    """`update_rates`: by optimizer, the bytes of parameters that go through a step in a second;
    the calls: seconds for each pass of a stage, whatever its nodes; `reading`: what reading a
    minibatch takes from the passes of a stage that needs it. `spread`: what passes of the whole
    model took, as multiples of their median.
    """

    update_rates: Mapping[str, float]
    call_forward: float = 0.0
    call_backward: float = 0.0
    reading: float = 0.0
    spread: Sequence[float] = ()

    def beside(self, stage: int, stages: int) -> tuple[float, float]:
        """What the passes of a stage take beside its nodes, forward and backward.

        The first of them reads the inputs, the last one the target, each for itself.
        """
        reads = stage in (0, stages - 1)
        return self.call_forward + (self.reading if reads else 0.0), self.call_backward


_STOPPED = 3.0
"""A pass of so many times the median was interrupted: no training takes that."""


class _Update(BaseModel):
    bytes_per_second: float = Field(gt=0, allow_inf_nan=False)


class _Fitted(BaseModel):
    call_seconds: float = Field(ge=0, allow_inf_nan=False)


class _Profile(BaseModel):
    """What of profile.json is needed here; the rest may be whatever it is."""

    model_config = ConfigDict(extra="ignore")

    updates: dict[str, _Update] = {}
    forward: _Fitted | None = None
    backward: _Fitted | None = None
    reading_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    pass_seconds: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = ()


def read_upkeep(path: Path) -> Upkeep:
    """What a profile says of it. Raises UserError if there is no such file, or it is malformed."""
    profile = read_artifact(path, _Profile)
    return Upkeep(
        {name: update.bytes_per_second for name, update in profile.updates.items()},
        profile.forward.call_seconds if profile.forward else 0.0,
        profile.backward.call_seconds if profile.backward else 0.0,
        profile.reading_seconds or 0.0,
        _spread(profile.pass_seconds),
    )


def _spread(seconds: Sequence[float]) -> Sequence[float]:
    if not seconds:
        return ()
    median = statistics.median(seconds)
    return [each / median for each in seconds if each < _STOPPED * median]
