"""The differences between two profiles, node by node."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING

import pandas as pd

from pipedream.graph.profile import Profile
from pipedream.profiler.report.layers import QUANTITIES, layers_frame

if TYPE_CHECKING:
    from typing import TypeAlias

    Numbers: TypeAlias = pd.Series[float]
    Flags: TypeAlias = pd.Series[bool]

_SAME = 0.01
"""Smaller relative differences of sizes per example are ignored: some parts do not grow."""


@dataclass(frozen=True)
class Diff:
    """Profile `b` compared with profile `a`.

    Two nodes correspond if they are the n-th call of the same operator by the same module. If the
    batch sizes differ, changes are per example, except of quantities that do not grow with them.
    """

    a: Profile
    b: Profile

    @property
    def per_example(self) -> bool:
        return self.a.batch_size != self.b.batch_size

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Returns a row for each node: those of `a` in order, then those only in `b`.

        The columns are those of `layers_frame` with `_a` and `_b`; NaN if a profile lacks the node.
        The index is module, op and occurrence (from 1).
        """
        a, b = _by_call(self.a), _by_call(self.b)
        calls = a.index.append(b.index.difference(a.index, sort=False))
        return a.reindex(calls).add_suffix("_a").join(b.reindex(calls).add_suffix("_b"))

    def table(self) -> pd.DataFrame:
        """Returns `frame` with `_change` (`_change_per_example`), `_differs` of each quantity."""
        columns: dict[str, Numbers | Flags] = {}
        for name, quantity in QUANTITIES.items():
            per = "_per_example" if self.per_example and quantity.grows else ""
            columns[f"{quantity.column}_change{per}"] = self.change(name)
            columns[f"{quantity.column}_differs"] = self.differs(name)
        return self.frame.assign(**columns).reset_index()

    @property
    def only_in_a(self) -> Flags:
        return self.frame["id_b"].isna()

    @property
    def only_in_b(self) -> Flags:
        return self.frame["id_a"].isna()

    def values(self, column: str) -> tuple[Numbers, Numbers]:
        """Returns a column of both per minibatch: 0 for a missing node, NaN if not measured."""
        a = self.frame[f"{column}_a"].mask(self.only_in_b, 0.0)
        b = self.frame[f"{column}_b"].mask(self.only_in_a, 0.0)
        return a, b

    def per(self, name: str) -> tuple[Numbers, Numbers]:
        """Returns a quantity of `a` and of `b` as compared: per example if `per_example`."""
        return self._per(name, *self.values(QUANTITIES[name].column))

    def change(self, name: str) -> Numbers:
        """Returns the increase of a quantity from `a` to `b`."""
        a, b = self.per(name)
        return b - a

    def differs(self, name: str) -> Flags:
        """Tells whether a size changed, or a time by more than its spread.

        A time differs if the interquartile ranges of `a` and `b`, summed over passes, are disjoint.
        """
        quantity = QUANTITIES[name]
        if not quantity.passes:
            least = self.per(name)[0] * _SAME if self.per_example and quantity.grows else 0.0
            return self.change(name).abs() > least
        lower_a, lower_b = self._quartile(name, "lower")
        upper_a, upper_b = self._quartile(name, "upper")
        return (lower_b > upper_a) | (upper_b < lower_a)

    def _quartile(self, name: str, which: str) -> tuple[Numbers, Numbers]:
        parts = (self.values(f"{part}_{which}_seconds") for part in QUANTITIES[name].passes)
        a, b = reduce(lambda both, part: (both[0] + part[0], both[1] + part[1]), parts)
        return self._per(name, a, b)

    def _per(self, name: str, a: Numbers, b: Numbers) -> tuple[Numbers, Numbers]:
        if self.per_example and QUANTITIES[name].grows:
            return a / self.a.batch_size, b / self.b.batch_size
        return a, b


def _by_call(profile: Profile) -> pd.DataFrame:
    frame = layers_frame(profile)
    frame["occurrence"] = frame.groupby(["module", "op"]).cumcount() + 1
    return frame.set_index(["module", "op", "occurrence"])


def differing_settings(a: Profile, b: Profile) -> dict[str, tuple[object, object]]:
    """Returns the settings in which two profiles differ: those of machine, model and repeats."""
    fields = ("batch_size", "model", "args", "repeats", "warmup")
    of_a, of_b = (
        profile.machine.model_dump() | {name: getattr(profile, name) for name in fields}
        for profile in (a, b)
    )
    return {name: (of_a[name], of_b[name]) for name in of_a if of_a[name] != of_b[name]}
