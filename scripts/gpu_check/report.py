"""What the checks came to: a table for people, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_check.check import Outcome, State

_NAME, _STATE, _FIGURE, _BAR = 22, 9, 21, 14


def heading() -> str:
    return (
        f"{'check':{_NAME}}{'':{_STATE}}{'figure':{_FIGURE}}{'bar':{_BAR}}{'seconds':>7}  "
    ).rstrip()


def row(outcome: Outcome) -> str:
    """Returns a line of the table."""
    check = outcome.check
    figure = "" if outcome.value is None else f"{outcome.value:.4g} {check.unit}"
    bar = "" if check.bar is None else str(check.bar)
    line = (
        f"{check.name:{_NAME}}{outcome.state:{_STATE}}{figure:{_FIGURE}}{bar:{_BAR}}"
        f"{outcome.seconds:7.1f}"
    )
    return f"{line}  {outcome.detail}".rstrip()


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Returns a line that says how many of them did what."""
    counts = {state: sum(each.state is state for each in outcomes) for state in State}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    return int(any(each.is_bad for each in outcomes))


def _written(value: float | None) -> float | str | None:
    """JSON has no nan and no infinity."""
    return value if value is None or math.isfinite(value) else str(value)


def write_json(path: Path, machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Writes all figures, with the machine and the versions that they belong to."""
    checks = [
        {
            "name": each.check.name,
            "state": each.state,
            "value": _written(each.value),
            "unit": each.check.unit,
            "bar": None if each.check.bar is None else str(each.check.bar),
            "seconds": round(each.seconds, 1),
            "limit_seconds": each.check.seconds,
            "detail": each.detail,
        }
        for each in outcomes
    ]
    text = json.dumps({"machine": machine, "checks": checks}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
