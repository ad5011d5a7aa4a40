"""Prints `pd-profile --diff`: the settings, the nodes that changed, and the totals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from pipedream.graph.errors import UserError
from pipedream.graph.profile import Profile
from pipedream.graph.tables import make_console
from pipedream.profiler.report.diff import Diff, differing_settings
from pipedream.profiler.report.layers import QUANTITIES, Quantity, layer_names
from pipedream.profiler.report.table import how_many, make_table

if TYPE_CHECKING:
    import pandas as pd

_MOST_NAMES = 12
_ALIKE = "Same machine, versions, batch size and model."
_SPARE = ("bi", "bw", "workspace", "saved", "activations", "parameters", "backward", "forward")
"""The columns to leave out first if the terminal is too narrow."""


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
    """Returns the indices of nodes that changed, and whether they differ beyond the spread.

    Those that differ come first, and large changes before small ones.
    """
    import pandas as pd

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
