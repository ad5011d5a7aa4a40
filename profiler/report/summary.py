"""Prints a profile: its nodes, sorted, in a table that fits the terminal, and the totals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipedream.graph.errors import UserError
from pipedream.graph.profile import Profile, Quartiles
from pipedream.graph.shown.tables import break_words, make_console
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.graph.variation import PassVariation
from pipedream.profiler.report.compiling import compiling_lines, groups_columns
from pipedream.profiler.report.layers import QUANTITIES, layer_names, layers_frame

_SPARE = (
    *("bi", "bw", "workspace", "time", "saved", "parameters", "activations"),
    *("backward", "forward"),
)
"""The columns to leave out first if the terminal is too narrow."""

_GAP = 2  # between columns
_HEAVIEST = 10
_NOISY = 0.1
"""Share of their medians by which repeats of layers may differ."""


def print_report(profile: Profile, sort: str = "time", top: int | None = None) -> None:
    """Prints the nodes with the largest `sort`, then the totals; `top`: see `how_many`.

    `sort` is one of `layers.ORDERS`. Raises UserError if the profile lacks it.
    """
    console = make_console()
    console.print(_table(profile, sort, how_many(sort, top), console.width))
    console.print()
    if profile.compiled_groups:
        labels, numbers = groups_columns(profile)
        title = "groups of layers as they are and compiled, each by itself"
        console.print(make_table(title, labels, numbers, console.width, spare=("compile",)))
        console.print()
    console.print(_summary(profile), soft_wrap=True)


def _table(profile: Profile, sort: str, top: int | None, width: int) -> Table:
    frame = layers_frame(profile)
    by = QUANTITIES["time" if sort == "order" else sort]
    if frame[by.column].isna().any():
        raise UserError(
            f"--sort {sort}: this profile is from an older pd-profile and lacks it: run pd-profile"
            " again, or sort by another quantity"
        )
    frame["share"] = frame[by.column] / (frame[by.column].sum() or 1.0)
    if sort != "order":
        frame = frame.sort_values(by.column, ascending=False, kind="stable")
    frame = frame.head(top or len(frame))
    numbers = {
        quantity.heading: [quantity.show(value) for value in frame[quantity.column]]
        for quantity in QUANTITIES.values()
        if frame[quantity.column].notna().all()
    }
    numbers["share"] = [f"{share:.1%}" for share in frame["share"]]
    return make_table(
        _title(profile, sort, len(frame)),
        {"node": list(frame["id"]), "layer": layer_names(frame)},
        numbers,
        width,
        spare=[QUANTITIES[name].heading for name in _SPARE if name != sort or sort == "time"],
    )


def _title(profile: Profile, sort: str, rows: int) -> str:
    count = len(profile.nodes)
    if sort == "order":
        which = f"{count} nodes in execution order" + (
            f", the first {rows}" if rows < count else ""
        )
    else:
        which = f"heaviest of {count} nodes by {sort}"
    return f"{profile.title}: {which}"


def _summary(profile: Profile) -> str:
    totals, machine = profile.totals, profile.machine
    threads = "1 thread" if machine.threads == 1 else f"{machine.threads} threads"
    where = machine.device_name + (f", {threads}" if machine.device == "cpu" else "")
    lines = [
        f"All nodes: forward {show_seconds(totals.forward_seconds)}, "
        f"backward {show_seconds(totals.backward_seconds)} for a minibatch of "
        f"{profile.batch_size}; parameters {show_bytes(totals.parameter_bytes)}."
    ]
    if profile.loss is not None:
        both = profile.loss.forward_seconds.median + profile.loss.backward_seconds.median
        lines.append(f"The loss takes {show_seconds(both)} of that, in the last node.")
    if machine.workers > 1:
        where += f", {machine.workers} workers at once"
    if profile.estimated is not None:
        return "\n".join([*lines, f"Estimated, not measured, for {profile.estimated.words}."])
    lines.append(
        f"Measured on {where}: median of {profile.repeats} after {profile.warmup} of warm-up."
    )
    lines += compiling_lines(profile)
    spread_share = _spread(profile)
    if not profile.pass_seconds and spread_share > _NOISY:
        lines.append(
            f"Noisy: half of the repeats of a layer are up to {spread_share:.0%} from their median;"
            " repeat on an idle machine."
        )
    if len(profile.pass_seconds) > 1:
        which = "" if profile.compile is None else ", not compiled,"
        spread = Quartiles.of(profile.pass_seconds)
        lines.append(
            f"Passes of the whole model{which} took {show_seconds(spread.median)}; half of them"
            f" between {show_seconds(spread.lower)} and {show_seconds(spread.upper)}."
        )
        if profile.variation is not None and profile.variation.drift:
            lines.append(_drift(profile.variation))
        if spread.spread > _NOISY * spread.median:
            lines.append("Noisy: passes vary by more than 10%; repeat on an idle machine.")
    if profile.forward is not None and profile.backward is not None:
        lines.append(
            "Check: parts of the model timed as a whole differ from the sums of their layers by"
            f" {profile.forward.typical_error:.1%} forward and {profile.backward.typical_error:.1%}"
            f" backward (median of {len(profile.stretches)}; worst"
            f" {profile.forward.worst_error:.1%} and {profile.backward.worst_error:.1%})."
        )
    return "\n".join(lines)


def _drift(variation: PassVariation) -> str:
    """Says by how much, and whose it is."""
    text = f"The machine drifted by {variation.drift:.1%} meanwhile, beside what differs from pass"
    if not variation.own:
        return f"{text} to pass."
    own = f"each worker by {variation.own:.1%} of its own, so that others wait for it"
    return f"{text} to pass; {own}."


def _spread(profile: Profile) -> float:
    """Returns half the distance between the quartiles of all nodes, as a share of their medians."""
    quartiles = [q for node in profile.nodes for q in (node.forward_seconds, node.backward_seconds)]
    whole = sum(each.median for each in quartiles)
    return sum(each.spread for each in quartiles) / whole if whole else 0.0


def how_many(sort: str, top: int | None) -> int | None:
    """Returns the rows to show, None for all: `top`, by default ten, or all in execution order."""
    if top is None:
        return None if sort == "order" else _HEAVIEST
    return top or None


def make_table(
    title: str,
    labels: Mapping[str, Sequence[str]],
    numbers: Mapping[str, Sequence[str]],
    width: int,
    spare: Iterable[str] = (),
) -> Table:
    """Returns a table of text and number columns by heading; the last text column wraps, at dots.

    If less than a third of `width` would be left for it, and it needs more, columns in `spare` are
    left out, first to last.
    """
    *narrow, wide = labels.values()
    available = width - min(max(map(len, wide), default=0), width // 3)
    available -= sum(_width(heading, labels[heading]) for heading in list(labels)[:-1])
    widths = {heading: _width(heading, cells) for heading, cells in numbers.items()}
    for heading in spare:
        if sum(widths.values()) > available:
            widths.pop(heading, None)
    room = available + min(max(map(len, wide), default=0), width // 3) - sum(widths.values())
    broken = [break_words(cell, max(room, 1)) for cell in wide]
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, _GAP - 1, 0, 0),
    )
    for heading in labels:
        table.add_column(heading, no_wrap=labels[heading] is not wide, overflow="fold")
    for heading in widths:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in zip(*narrow, broken, *(numbers[heading] for heading in widths), strict=True):
        table.add_row(*row)
    return table


def _width(heading: str, cells: Iterable[str]) -> int:
    """Returns the width of a column in characters, including the gap."""
    return max(map(len, (*heading.split("\n"), *cells))) + _GAP
