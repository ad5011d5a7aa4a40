"""`pd-profile --batch-sizes`: profiles a model at several batch sizes and compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipedream.graph.command import UserError, whole, write_whole, writing
from pipedream.graph.profile import BATCH_SIZES_TABLE, difference, folder_of, sizes_in
from pipedream.graph.shown.tables import make_console, print_table
from pipedream.graph.units import show_bytes, show_seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from pipedream.graph.profile import Profile
    from pipedream.profiler.assembly import Measured

PICTURE = "batch_sizes.png"
_OPTION = "--batch-sizes"
_DPI = 120
_PANELS = {"time per example": "s", "examples per second": "", "saved for backward": "B"}
"""Titles and units."""


def parse_batch_sizes(text: str) -> list[int]:
    """Parses `1,2,4,8` and sorts the sizes. Raises UserError."""
    try:
        sizes = sorted(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{_OPTION} {text}: give whole numbers, as 1,2,4,8") from None
    if sizes[0] < 1:
        raise UserError(f"{_OPTION} {text}: {sizes[0]} is not a batch size: give 1 or more")
    for size, following in pairwise(sizes):
        if size == following:
            raise UserError(f"{_OPTION} {text}: {size} is given twice: remove one of them")
    if len(sizes) < 2:
        raise UserError(f"{_OPTION} {text}: nothing to compare: give two or more, or --batch-size")
    return sizes


def check_folder(folder: Path, sizes: Sequence[int]) -> None:
    """Raises UserError if `folder` has profiles at other sizes, which would be mixed with these."""
    for size in sizes_in(folder):
        if size not in sizes:
            raise UserError(
                f"-o {folder}: batch-{size} is from an earlier run and not in {_OPTION}: delete it,"
                " or name another folder"
            )


def profile_sizes(
    sizes: Sequence[int],
    folder: Path,
    measure: Callable[[int], Measured],
    write: Callable[[Measured, Path], str],
) -> None:
    """Writes a profile for each size into a folder of its own, then a comparison, and prints it.

    `measure` returns the profile at a size; `write` writes one and returns the names of its files.
    Raises UserError if the model cannot be profiled at a size or has another structure there.
    """
    results: list[Measured] = []
    for size in sizes:
        try:
            results.append(measure(size))
        except UserError as error:
            raise UserError(f"at batch size {size}: {error.format_message()}") from error
        _check_alike(results)
        click.echo(f"Written: {write(results[-1], folder_of(folder, size))}")
    profiles = [measured.profile for measured in results]
    frame = batch_sizes_frame(profiles)
    title = f"{profiles[0].model} at {len(sizes)} batch sizes"
    with writing(folder):
        write_whole(folder / BATCH_SIZES_TABLE, frame.to_csv(index=False))
        draw_batch_sizes(frame, title, folder / PICTURE)
    console = make_console()
    console.print()
    print_table(console, batch_sizes_table(frame, title))
    console.print()
    click.echo(f"Written: {folder}/{BATCH_SIZES_TABLE}, {PICTURE}")


def _check_alike(results: Sequence[Measured]) -> None:
    """Raises UserError unless the last differs from the first only in the number of examples."""
    least, last = results[0].profile, results[-1].profile
    change = difference(results[0].graph, least.batch_size, results[-1].graph, last.batch_size)
    if change is not None:
        raise UserError(
            f"{_OPTION}: the model has another structure at batch size {last.batch_size}: {change};"
            " make it independent of the batch size, or profile at one size"
        )
    if len(results) > 1 and _input_shapes(least) == _input_shapes(last):
        raise UserError(
            f"{_OPTION}: {last.model} returns inputs of the same shape at {least.batch_size} and"
            f" {last.batch_size}: add a parameter batch_size to its factory, or use --input"
        )


def _input_shapes(profile: Profile) -> list[tuple[int, ...]]:
    """Returns the shapes of the inputs of the model."""
    sources = (node for node in profile.nodes if node.op.startswith("Input") and not node.inputs)
    return [tensor.shape for node in sources for tensor in node.outputs]


def batch_sizes_frame(profiles: Iterable[Profile]) -> pd.DataFrame:
    """Returns a row for each batch size: seconds, bytes, and the speed-up over the first.

    Seconds are those of the whole model on one worker: its nodes and one call, as fitted. Bytes are
    None unless all nodes have them.
    """
    import pandas as pd

    frame = pd.DataFrame(_row(profile) for profile in profiles)
    frame["speedup"] = frame["examples_per_second"] / frame["examples_per_second"].iloc[0]
    return frame


def _row(profile: Profile) -> dict[str, float | None]:
    size, totals = profile.batch_size, profile.totals
    overheads = profile.training_overheads
    forward = totals.forward_seconds + overheads.call_forward
    backward = totals.backward_seconds + overheads.call_backward
    known = [node.saved_bytes for node in profile.nodes if node.saved_bytes is not None]
    saved = sum(known) if len(known) == len(profile.nodes) else None
    return {
        "batch_size": size,
        "forward_seconds": forward,
        "backward_seconds": backward,
        "forward_seconds_per_example": forward / size,
        "backward_seconds_per_example": backward / size,
        "seconds_per_example": (forward + backward) / size,
        "examples_per_second": size / (forward + backward) if forward + backward else None,
        "saved_bytes": saved,
        "saved_bytes_per_example": None if saved is None else saved / size,
    }


def batch_sizes_table(frame: pd.DataFrame, title: str) -> Table:
    """Returns the frame as a table for the terminal."""
    table = Table(
        title=title,
        caption="Saved: memory for the backward pass. Speed-up: examples per second relative to the"
        " first row.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    times = ("forward", "backward", "per\nexample", "examples\nper second")
    for heading in ("batch\nsize", *times, "saved", "saved per\nexample", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in frame.to_dict("records"):
        saved = (row["saved_bytes"], row["saved_bytes_per_example"])
        table.add_row(
            str(row["batch_size"]),
            *(show_seconds(row[f"{name}_seconds"]) for name in ("forward", "backward")),
            show_seconds(row["seconds_per_example"]),
            f"{row['examples_per_second']:.4g}",
            *("-" if size is None or size != size else show_bytes(size) for size in saved),
            f"{row['speedup']:.2f}",
        )
    return table


def draw_batch_sizes(frame: pd.DataFrame, title: str, path: Path) -> None:
    """Draws seconds per example, examples per second and saved bytes over the batch size (PNG).

    Saved bytes are left out if unknown.
    """
    from matplotlib.figure import Figure

    saved = bool(frame["saved_bytes"].notna().all())
    figure = Figure(figsize=(13.5 if saved else 9.0, 4.2), layout="constrained")
    figure.suptitle(title, parse_math=False)
    panels = list(figure.subplots(1, 3 if saved else 2, squeeze=False)[0])
    # Okabe and Ito's colours, as in layers.png.
    _draw_line(panels[0], frame, "seconds_per_example", "#333333", linestyle="--", label="both")
    _draw_line(panels[0], frame, "backward_seconds_per_example", "#0072B2", label="backward")
    _draw_line(panels[0], frame, "forward_seconds_per_example", "#56B4E9", label="forward")
    panels[0].legend(frameon=False, fontsize=9)
    _draw_line(panels[1], frame, "examples_per_second", "#009E73")
    if saved:
        _draw_line(panels[2], frame, "saved_bytes", "#7A3300")
    sizes = list(frame["batch_size"])
    for axes, (name, unit) in zip(panels, _PANELS.items(), strict=False):
        _label(axes, name, unit, sizes)
    with whole(path) as fresh:
        figure.savefig(fresh, dpi=_DPI)


def _draw_line(axes: Axes, frame: pd.DataFrame, column: str, colour: str, **look: Any) -> None:
    sizes, values = frame["batch_size"], frame[column]
    axes.plot(sizes, values, marker="o", markersize=4, color=colour, **look)


def _label(axes: Axes, title: str, unit: str, sizes: Sequence[int]) -> None:
    """Labels the batch sizes on a logarithmic axis; the other axis starts at zero."""
    from matplotlib.ticker import EngFormatter

    axes.set_title(title, loc="left", fontsize=10)
    axes.yaxis.set_major_formatter(EngFormatter(unit))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
