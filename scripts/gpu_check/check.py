"""A check: what is measured, within what time, and what it must come to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple


class Skipped(Exception):
    """Says why something cannot be measured here."""


class Setting(NamedTuple):
    """`device`: cpu or cuda; on a CPU sizes are small. `folder`: where files go."""

    device: str
    folder: Path

    @property
    def small(self) -> bool:
        return self.device == "cpu"


class Measured(NamedTuple):
    """`detail`: what else is worth knowing, in words."""

    value: float
    detail: str = ""


class Bar(NamedTuple):
    """The range in which a figure must be."""

    least: float = -math.inf
    most: float = math.inf

    def admits(self, value: float) -> bool:
        return self.least <= value <= self.most  # not nan

    def __str__(self) -> str:
        if math.isinf(self.least):
            return f"at most {self.most:g}"
        if math.isinf(self.most):
            return f"at least {self.least:g}"
        return f"{self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Check:
    """`measure`: MODULE:FUNCTION, called with a Setting and the `arguments`, returns a Measured.
    `seconds`: its limit. `bar`: None for what is only reported. `gpus`: how many it needs; with one
    it is shown one GPU alone, so that ranks share it. `environment`: what is set for it.
    """

    name: str
    measure: str
    seconds: float
    bar: Bar | None
    unit: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    gpus: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


class State(StrEnum):
    PASSED = "passed"
    MISSED = "missed"
    MEASURED = "measured"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """What a check came to. `detail`: of one without a value, why."""

    check: Check
    state: State
    seconds: float
    value: float | None = None
    detail: str = ""

    @property
    def is_bad(self) -> bool:
        return self.state in (State.MISSED, State.FAILED)
