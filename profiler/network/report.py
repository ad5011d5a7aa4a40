"""Prints and writes network measurements: tables, a picture, a CSV file and the cluster file."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipedream.graph.cluster import write_cluster
from pipedream.graph.command import whole, writing
from pipedream.graph.shown.tables import make_console, print_table
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.profiler.network.measure import MOST_MISS, MeasuredLevel, Timed, cluster

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def report(measured: Sequence[MeasuredLevel], provenance: str, folder: Path) -> None:
    """Prints the tables and writes the files. Raises UserError if they cannot be written.

    `provenance`: where and how the network was measured.
    """
    console = make_console()
    for each in measured:
        print_table(console, sizes_table(each))
    print_table(console, links_table(measured), labels=2)
    console.print(f"Measured on {provenance}.", soft_wrap=True)
    with writing(folder):
        notes = [f"Measured by pd-profile --network on {provenance}."]
        write_cluster(cluster(measured), folder / "cluster.yaml", notes)
        _write_numbers(measured, folder / "network.csv")
        draw(measured, folder / "network.png")
    print(f"Written: {folder}/cluster.yaml, network.csv, network.png")
    print(f"Next: pd-optimize GRAPH.txt --cluster {folder}/cluster.yaml")


def sizes_table(measured: MeasuredLevel) -> Table:
    """Returns a table of the median seconds at a level by size."""
    table = _table(f"Times between components of the level {measured.level.name}")
    table.add_column("bytes", justify="right")
    rows: list[list[str]] = []
    for _, kind, timed in _kinds([measured]):
        table.add_column(kind, justify="right", no_wrap=True)
        rows = rows or [[show_bytes(size)] for size in timed.sizes]
        for row, seconds, spread in zip(rows, timed.seconds, timed.spread, strict=True):
            row.append(f"{show_seconds(seconds)} ±{spread:.0%}")
    for row in rows:
        table.add_row(*row)
    table.caption = "±: half the interquartile range of the repeats."
    return table


def links_table(measured: Sequence[MeasuredLevel]) -> Table:
    """Returns a table of the latency and bandwidth of each link, and of the error of the fit."""
    table = _table("Links: latency plus bytes over bandwidth")
    for heading in ("level", ""):
        table.add_column(heading, no_wrap=True)
    headings = ("latency", "bandwidth", "off by\nat most", "written\nas", "slowest", "busy")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for level, kind, timed in _kinds(measured):
        fit = timed.fit
        table.add_row(
            level,
            kind,
            show_seconds(fit.line.latency),
            f"{show_bytes(fit.line.bandwidth or 0.0)}/s",
            f"{fit.miss:.0%}",
            "line" if fit.link == fit.line else "points",
            f"{timed.slowest:.2f} x",
            f"{timed.busy:.0%}",
        )
    table.caption = (
        f"Written as points if the line is off by more than {MOST_MISS:.0%}. Slowest: the slowest"
        " pair or group over the median. Busy: the share of the time in which the ranks cannot"
        " compute."
    )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)


def _kinds(measured: Sequence[MeasuredLevel]) -> Iterator[tuple[str, str, Timed]]:
    """Yields (name of the level, what was measured, times)."""
    for each in measured:
        yield each.level.name, "send", each.send
        yield each.level.name, f"all-reduce of {each.level.count}", each.all_reduce
        yield each.level.name, f"all-gather of {each.level.count}", each.all_gather


def _write_numbers(measured: Sequence[MeasuredLevel], path: Path) -> None:
    with whole(path) as fresh, fresh.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["level", "kind", "bytes", "seconds", "spread", "line_seconds"])
        for level, kind, timed in _kinds(measured):
            line = timed.fit.line.seconds(timed.sizes).tolist()
            for numbers in zip(timed.sizes, timed.seconds, timed.spread, line, strict=True):
                table.writerow([level, kind, *(f"{number:.6g}" for number in numbers)])


def draw(measured: Sequence[MeasuredLevel], path: Path) -> None:
    """Draws seconds against bytes with the lines: messages, all-reduces and all-gathers (PNG)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15.0, 5.0), layout="constrained")
    sends, sums, gathers = figure.subplots(1, 3, sharey=True)
    for colour, each in zip(_COLOURS, measured, strict=False):
        over = f"{each.level.name}, over {each.level.count}"
        _draw(sends, each.level.name, each.send, colour)
        _draw(sums, over, each.all_reduce, colour)
        _draw(gathers, over, each.all_gather, colour)
    sends.set_title("one message", loc="left")
    sums.set_title("all-reduce", loc="left")
    gathers.set_title("all-gather", loc="left")
    sends.set_ylabel("time")
    for axes in (sends, sums, gathers):
        axes.set_xlabel("bytes")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda size, _: show_bytes(size))
        axes.yaxis.set_major_formatter(lambda seconds, _: show_seconds(seconds))
        axes.grid(color="#E5E5E5", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left")
    with whole(path) as fresh:
        figure.savefig(fresh, dpi=110)


def _draw(axes: Axes, name: str, timed: Timed, colour: str) -> None:
    line = timed.fit.line
    label = f"{show_seconds(line.latency)} + bytes / ({show_bytes(line.bandwidth or 0.0)}/s)"
    sizes = np.geomspace(timed.sizes[0], timed.sizes[-1], 200)
    axes.plot(sizes, line.seconds(sizes), color=colour, linewidth=1.2, label=f"{name}: {label}")
    if timed.fit.link != line:
        written = timed.fit.link.seconds(sizes)
        axes.plot(sizes, written, color=colour, linewidth=1.0, linestyle=":", label="as written")
    seconds = np.array(timed.seconds)
    axes.errorbar(
        timed.sizes,
        seconds,
        yerr=seconds * np.minimum(timed.spread, 0.95),
        color=colour,
        fmt="o",
        markersize=4,
        elinewidth=1,
    )
