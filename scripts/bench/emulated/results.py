"""What was measured of each case, kept in a file from which an interrupted comparison goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from plans import CHOSEN

_CLOSE = 1.05
"""A plan that takes so many times as long as the best is as good."""
_PLAN = ("profile", "cluster", "plan")
_SAID = ("stages", "equal_to", "problem", "closed_ms", "simulated_ms")
_MEASURED = ("measured_ms", "excess", "cores", "machine_cores")


class Case(NamedTuple):
    """One run: the plan of that name for a profile and a cluster."""

    profile: str
    cluster: str
    plan: str
    repetition: int

    @property
    def folder(self) -> str:
        return "-".join(map(str, self))


class Results:
    """The lines of a file, one for each case."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def add(self, case: Case, figures: dict[str, Any]) -> None:
        row = {**case._asdict(), **figures}
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def of(self, case: Case) -> dict[str, Any] | None:
        """The line of a case, None if it was not run."""
        found = (row for row in self.rows if all(row[k] == v for k, v in case._asdict().items()))
        return next(found, None)

    def table(self) -> pd.DataFrame:
        """A row for each plan of each profile and cluster: times in milliseconds of the profile.

        `error`: of the simulated time against the median of the measured ones.
        """
        frame = pd.DataFrame(self.rows, columns=[*Case._fields, *_SAID, *_MEASURED])
        return pd.DataFrame(
            _summed_up(rows) for _, rows in frame.groupby(list(_PLAN), sort=False, dropna=False)
        )

    def row(self, case: Case) -> pd.DataFrame:
        """That of the plan of a case."""
        table = self.table()
        return table[(table[list(_PLAN)] == case[:3]).all(axis=1)]

    def summary(self) -> list[str]:
        """How far off the simulator is, and how good the chosen plans are."""
        table = self.table().dropna(subset="median")
        lines = []
        errors = table[table["equal_to"].isna()]["error"].abs()
        if len(errors):
            lines.append(
                f"{len(errors)} plans: the simulated time is off by {errors.median():.1%} in the"
                f" median, {errors.max():.1%} in the worst case"
            )
        found = [_against_best(group) for _, group in table.groupby(list(_PLAN[:2]), sort=False)]
        known = [ratio for ratio in found if ratio is not None]
        if known:
            lines.append(
                f"the chosen plan is within {_CLOSE - 1:.0%} of the best that was measured in"
                f" {sum(ratio <= _CLOSE for ratio in known)} of {len(known)} cases; worst:"
                f" {max(known):.2f} times as long"
            )
        return lines


def _summed_up(rows: pd.DataFrame) -> dict[str, Any]:
    """All repetitions of a plan as one row."""
    last, measured = rows.iloc[-1], rows["measured_ms"].dropna()
    return {
        **last[list(_PLAN)],
        "stages": last["stages"],
        "closed": last["closed_ms"],
        "simulated": last["simulated_ms"],
        "measured": " ".join(f"{milliseconds:.1f}" for milliseconds in measured),
        "median": measured.median(),
        "error": last["simulated_ms"] / measured.median() - 1,
        "excess": rows["excess"].median(),
        "cores": rows["cores"].median(),
        "machine": rows["machine_cores"].median(),
        "equal_to": last["equal_to"],
        "problem": last["problem"],
    }


def _against_best(group: pd.DataFrame) -> float | None:
    """The time of the chosen plan over that of the best; None if there is nothing to compare."""
    chosen = group[group["plan"] == CHOSEN]["median"]
    if chosen.empty or len(group) < 2:
        return None
    return float(chosen.iloc[0] / group["median"].min())


def show(table: pd.DataFrame, header: bool = True) -> str:
    """The table as text: shares in percent."""
    formats = dict.fromkeys(("error", "excess"), "{:+.1%}".format)
    formats |= dict.fromkeys(("cores", "machine"), "{:.2f}".format)
    return table.to_string(
        index=False, header=header, na_rep="", float_format="{:.1f}".format, formatters=formats
    )
