"""`pd-profile --diff`: the differences between two profiles, node by node, and their report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING

import pandas as pd
from rich.table import Table

from pipedream.graph.errors import UserError
from pipedream.graph.profile import Profile
from pipedream.graph.shown.tables import make_console
from pipedream.profiler.report.layers import QUANTITIES, Quantity, layer_names, layers_frame
from pipedream.profiler.report.summary import how_many, make_table

if TYPE_CHECKING:
    from typing import TypeAlias

    Numbers: TypeAlias = pd.Series[float]
    Flags: TypeAlias = pd.Series[bool]

_SAME = 0.01
"""Smaller relative differences of sizes per example are ignored: some parts do not grow."""

_MOST_NAMES = 12
_ALIKE = "Same machine, versions, batch size and model."
_SPARE = ("bi", "bw", "workspace", "saved", "activations", "parameters", "backward", "forward")
"""The columns to leave out first if the terminal is too narrow."""


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


def print_diff(diff: Diff, sort: str = "time", top: int | None = None) -> None:
    """Prints the nodes with the largest changes of `sort`, then the totals; `top`: see `how_many`.

    `sort` is one of `layers.ORDERS`. Raises UserError if one of the profiles lacks it.
    """
    known = [name for name in QUANTITIES if diff.change(name).notna().all()]
    if sort not in (*known, "order"):
        raise UserError(
            f"--sort {sort}: one of these profiles is from an older pd-profile and lacks it:"
            " run pd-profile again, or sort by another quantity"
        )
    console = make_console()
    console.print(_settings(diff), soft_wrap=True)
    changed = _changed(diff, known, sort)
    if not len(changed):
        console.print("No node differs.")
        return
    shown = changed.index[: how_many(sort, top)]
    title = f"{len(changed)} of {len(diff.frame)} nodes changed, {changed.sum()} beyond the spread"
    console.print()
    console.print(_nodes(diff, shown, known, sort, title, console.width))
    console.print()
    console.print(_totals(diff, known, console.width))
    console.print()
    for line in _remarks(diff, known):
        console.print(line, soft_wrap=True)


def _settings(diff: Diff) -> str:
    lines = [f"{name}: {_measured_on(profile)}" for name, profile in (("A", diff.a), ("B", diff.b))]
    different = "; ".join(
        f"{name.replace('_', ' ')} {here} and {there}"
        for name, (here, there) in differing_settings(diff.a, diff.b).items()
    )
    return "\n".join([*lines, f"Different: {different}." if different else _ALIKE])


def _measured_on(profile: Profile) -> str:
    machine = profile.machine
    threads = f", threads {machine.threads}" if machine.device == "cpu" else ""
    return (
        f"{profile.model}, batch size {profile.batch_size}, {machine.device_name}{threads}, torch"
        f" {machine.torch}, median of {profile.repeats}"
    )


def _changed(diff: Diff, known: list[str], sort: str) -> pd.Series[bool]:
    """Returns the changed nodes, and whether beyond the spread: those first, then large changes."""
    changes = pd.DataFrame({name: diff.change(name).to_numpy() for name in known})
    differs = pd.DataFrame({name: diff.differs(name).to_numpy() for name in known}).any(axis=1)
    order = pd.DataFrame({"differs": differs})
    if sort != "order":
        order["size"] = changes[sort].abs()
        order = order.sort_values(["differs", "size"], ascending=False, kind="stable")
    return order["differs"][(changes.loc[order.index] != 0).any(axis=1)]


def _nodes(
    diff: Diff, places: pd.Index[int], known: list[str], sort: str, title: str, width: int
) -> Table:
    by = "time" if sort == "order" else sort
    quantity = QUANTITIES[by]
    a, b = (values.iloc[places] for values in diff.per(by))
    alone = zip(diff.only_in_a.iloc[places], diff.only_in_b.iloc[places], strict=True)
    where = ["only in A" if in_a else "only in B" if in_b else "" for in_a, in_b in alone]
    numbers = {
        f"{by}\nA": [quantity.show(value) for value in a],
        f"{by}\nB": [quantity.show(value) for value in b],
        "change": _cells(diff, by, places),
        "": [text or _percent(here, there) for text, here, there in zip(where, a, b, strict=True)],
    }
    for name in known:
        if name != by and (name in ("forward", "backward") or diff.differs(name).any()):
            numbers[QUANTITIES[name].heading] = _cells(diff, name, places)
    return make_table(
        title + ("; per example" if diff.per_example else ""),
        {"layer": layer_names(diff.frame.iloc[places].reset_index())},
        numbers,
        width,
        spare=[QUANTITIES[name].heading for name in _SPARE],
    )


def _cells(diff: Diff, name: str, places: pd.Index[int]) -> list[str]:
    """Returns changes with their sign, and a star if they differ; empty without a change."""
    quantity = QUANTITIES[name]
    rows = zip(diff.change(name).iloc[places], diff.differs(name).iloc[places], strict=True)
    return [_signed(quantity, change) + ("*" if differs else " ") for change, differs in rows]


def _signed(quantity: Quantity, change: float) -> str:
    return f"{'-' if change < 0 else '+'}{quantity.show(abs(change))}" if change else ""


def _percent(a: float, b: float) -> str:
    return f"{b / a - 1:+.1%}" if a and b != a else ""


def _totals(diff: Diff, known: list[str], width: int) -> Table:
    """Returns sums over all nodes per minibatch, and their relative change per example."""
    rows = []
    for name in known:
        quantity = QUANTITIES[name]
        a, b = (float(values.sum()) for values in diff.values(quantity.column))
        per_a, per_b = (float(values.sum()) for values in diff.per(name))
        texts = (quantity.show(a), quantity.show(b), _signed(quantity, b - a), _percent(a, b))
        rows.append((*texts, _percent(per_a, per_b), str(int(diff.differs(name).sum()))))
    headings = ("A", "B", "change", "", "per example", "nodes\nthat differ")
    numbers = dict(zip(headings, map(list, zip(*rows, strict=True)), strict=True))
    if not diff.per_example:
        del numbers["per example"]
    return make_table("All nodes, for a minibatch", {"": known}, numbers, width)


def _remarks(diff: Diff, known: list[str]) -> Iterator[str]:
    names = layer_names(diff.frame.reset_index())
    for which, alone in (("A", diff.only_in_a), ("B", diff.only_in_b)):
        missing = [name for name, only in zip(names, alone, strict=True) if only]
        if missing:
            rest = len(missing) - _MOST_NAMES
            more = f" and {rest} more" if rest > 0 else ""
            yield f"Only in {which}: {', '.join(missing[:_MOST_NAMES])}{more}."
    if any(diff.differs(name).any() for name in known):
        yield "* a size that changed, or a time that changed by more than its spread."
    for which, profile in (("A", diff.a), ("B", diff.b)):
        if profile.repeats == 1:
            yield f"{which} was timed once, so its spread is unknown: measure with more --repeats."
