"""Timelines of a measured or simulated run: Gantt charts, memory over time, Chrome traces.

A timeline has, for each rank, its actions with the seconds in which they ran.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from pipedream.graph.command import write_whole

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Item = TypeVar("_Item")

_WIDTH = 14.0  # inches
_DPI = 110
_POINTS_PER_DIGIT = 5.5
_MOST_ROWS = 32
"""More rows than this are too low to read."""


class DrawnAction(Protocol):
    """The part of `pipedream.schedule.action.Action` that a picture needs."""

    @property
    def kind(self) -> str: ...
    @property
    def stage(self) -> int: ...
    @property
    def minibatch(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def peer(self) -> tuple[int, int] | None: ...
    @property
    def worker(self) -> str: ...


class Event(NamedTuple):
    """An action and the seconds in which it ran, by a clock that all ranks share."""

    action: DrawnAction
    begin: float
    end: float


Timeline: TypeAlias = Mapping[int, Sequence[Event]]
"""The events of each rank, in order of time."""

StepCurve: TypeAlias = Sequence[tuple[float, float]]
"""(seconds, amount from then on), in order of time; the last pair marks the end."""


@dataclass(frozen=True)
class Panel:
    """One timeline of a picture, from minibatch `first` to `first + count - 1`.

    If there are more than `most_rows` ranks, evenly spaced ones are drawn.
    """

    title: str
    ranks: Timeline
    first: int = 0
    count: int = 12
    most_rows: int = _MOST_ROWS

    @property
    def shown(self) -> Timeline:
        return {rank: self.ranks[rank] for rank in evenly(sorted(self.ranks), self.most_rows)}


class Style(NamedTuple):
    name: str
    colour: str
    text: str = "black"


# Okabe and Ito's palette, which colour-blind readers can tell apart.
STYLES = {
    "F": Style("forward", "#0072B2", "white"),
    "B": Style("backward", "#E69F00"),
    "BI": Style("backward, inputs", "#E69F00"),
    "BW": Style("backward, weights", "#D55E00"),
    "AR": Style("all-reduce", "#CC79A7"),
    "N": Style("norm of the gradients", "#56B4E9"),
    "U": Style("update", "#000000", "white"),
    "SA": Style("send", "#009E73"),
    "SG": Style("send", "#009E73"),
    "RA": Style("wait for a message", "#DDDDDD"),
    "RG": Style("wait for a message", "#DDDDDD"),
}
_PASSES = ("F", "B", "BI", "BW")


def png(figure: Figure, dpi: int) -> bytes:
    """The figure as the content of a file."""
    content = io.BytesIO()
    figure.savefig(content, dpi=dpi)
    return content.getvalue()


# Gantt charts


def draw(ranks: Timeline, path: Path, title: str, first: int = 0, count: int = 12) -> None:
    """Draws a Gantt chart (PNG) of minibatches `first` to `first + count - 1`, one row per rank.

    The window reaches from the start of their first pass to the end of their last, and shows
    everything that ran in between. Boxes carry the number of the minibatch if it fits. If there are
    more than 32 ranks, evenly spaced ones are drawn.
    """
    write_whole(path, panels_png([Panel(title, ranks, first, count)]))


def panels_png(panels: Sequence[Panel]) -> bytes:
    """Returns the picture that `draw` writes, with several timelines one below the other, on the
    same scale; the rows of several are lower, so that they are seen together.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [len(panel.shown) for panel in panels]
    windows = [_window(p.ranks, range(p.first, p.first + p.count)) for p in panels]
    length = max(end - begin for begin, end in windows)
    around, of_row = (1.0, 0.5) if len(panels) == 1 else (0.5, 0.22)
    shares = [around + of_row * count for count in rows]
    figure = Figure(figsize=(_WIDTH, 1.0 + sum(shares)), layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False, height_ratios=shares)[:, 0]
    for axes, panel, (begin, _) in zip(all_axes, panels, windows, strict=True):
        _draw_panel(axes, panel, begin, begin + length)
        if axes is not all_axes[-1]:
            axes.set_xlabel("")
            axes.tick_params(axis="x", labelbottom=False)
    visible = (e for p in panels for events in p.ranks.values() for e in events if e.end > e.begin)
    kinds = {event.action.kind for event in visible}
    colours = {style.name: style.colour for kind, style in STYLES.items() if kind in kinds}
    _legend(figure, [Patch(facecolor=colour, label=name) for name, colour in colours.items()])
    return png(figure, _DPI)


def _draw_panel(axes: Axes, panel: Panel, begin: float, end: float) -> None:
    ranks = panel.shown
    scale, unit = _unit(end - begin)
    axes.set_xlim(0, (end - begin) * scale)
    for row, events in enumerate(ranks.values()):
        shown = [event for event in events if event.end > begin and event.begin < end]
        _draw_row(axes, row, shown, _stages(events), begin, scale)
    axes.set_xlabel(f"time in {unit}")
    labels = [
        _row_label(rank, events) + " (later ones lighter)" * (len(_stages(events)) > 1)
        for rank, events in ranks.items()
    ]
    axes.set_yticks(range(len(ranks)), labels)
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    title = f"{panel.title}, {_which(panel)}" + _left_out(len(ranks), len(panel.ranks))
    axes.set_title(title, loc="left", parse_math=False)  # it may be the name of a folder


def _draw_row(
    axes: Axes,
    row: int,
    events: Sequence[Event],
    stages: Sequence[int],
    origin: float,
    scale: float,
) -> None:
    """Draws passes as high as the row, and everything else lower, so that it does not hide them.

    Of several `stages` on the rank the passes of later ones are lighter.
    """
    for kind, style in STYLES.items():
        of_kind = [event for event in events if event.action.kind == kind]
        if not of_kind:
            continue
        spans = [
            ((event.begin - origin) * scale, (event.end - event.begin) * scale) for event in of_kind
        ]
        height, edge = (0.8, "white") if kind in _PASSES else (0.4, "none")
        shades = {stage: _lighter(style.colour, stages, stage) for stage in stages}
        colours = [
            shades[event.action.stage] if kind in _PASSES else style.colour for event in of_kind
        ]
        bars = (row - height / 2, height)
        drawn = axes.broken_barh(spans, bars, facecolors=colours, edgecolors=edge)
        drawn.set_in_layout(False)  # it lies within the axes, and to ask it where takes long
    points_per_unit = 0.9 * _WIDTH * 72 / axes.get_xlim()[1]
    for event in events:
        text = str(event.action.minibatch)
        width = (event.end - event.begin) * scale * points_per_unit
        if event.action.kind in _PASSES and width > _POINTS_PER_DIGIT * (len(text) + 0.5):
            middle = ((event.begin + event.end) / 2 - origin) * scale
            first = event.action.stage == stages[0]
            colour = STYLES[event.action.kind].text if first else "black"
            axes.text(
                middle, row, text, ha="center", va="center", color=colour, size=8, clip_on=True
            )


def _stages(events: Sequence[Event]) -> list[int]:
    return sorted({event.action.stage for event in events})


def _lighter(colour: str, stages: Sequence[int], stage: int) -> tuple[float, ...]:
    """Returns the colour of a pass, unchanged for the first stage of the rank."""
    share = 0.6 * stages.index(stage) / max(1, len(stages) - 1)
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(part + (1 - part) * share for part in parts)


def _row_label(rank: int, events: Sequence[Event]) -> str:
    if not events:
        return f"rank {rank}: nothing to do"
    workers = sorted({event.action.worker for event in events})
    if len(workers) > 1:
        return f"rank {rank}: stages {', '.join(workers)}"
    stage, _, replica = workers[0].partition(".")
    return f"rank {rank}: stage {stage}" + (f", replica {replica}" if replica else "")


def _which(panel: Panel) -> str:
    """Says which minibatches are shown, as text."""
    total = max((event.action.minibatch for event in _passes(panel.ranks)), default=-1) + 1
    if panel.first == 0 and panel.count >= total:
        return f"all {total} minibatches"
    return f"from minibatch {panel.first} of {total}"


def _passes(ranks: Timeline) -> Iterator[Event]:
    return (event for events in ranks.values() for event in events if event.action.kind in _PASSES)


def _window(ranks: Timeline, minibatches: range) -> tuple[float, float]:
    passes = [event for event in _passes(ranks) if event.action.minibatch in minibatches]
    if not passes:
        return 0.0, 1.0
    return min(event.begin for event in passes), max(event.end for event in passes)


def _legend(figure: Figure, handles: Sequence[Artist]) -> None:
    if handles:
        columns = math.ceil(len(handles) / math.ceil(len(handles) / 9))
        figure.legend(handles=handles, ncols=columns, frameon=False, loc="outside lower center")


# Memory


def memory_png(
    memory: Mapping[int, StepCurve],
    stages: Sequence[Sequence[int]],
    title: str,
    limit: float | None = None,
) -> bytes:
    """Draws the bytes in use on each rank over time (PNG), in the colour of its stage.

    `stages` lists the ranks of each stage; `limit` is the memory of each rank.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 5.0), layout="constrained")
    axes = figure.add_subplot()
    most = max((amount for steps in memory.values() for _, amount in steps), default=0.0)
    end = max((time for steps in memory.values() for time, _ in steps), default=1.0)
    (factor, size), (scale, unit) = _size(max(most, limit or 0.0)), _unit(end)
    shown = evenly(sorted(rank for rank in memory if memory[rank]), _MOST_ROWS)
    stage_of = {rank: stage for stage, ranks in enumerate(stages) for rank in ranks}
    colours = _stage_colours(len(stages))
    for rank in shown:
        times, amounts = zip(*memory[rank], strict=True)
        axes.step(
            [time * scale for time in times],
            [amount / factor for amount in amounts],
            where="post",
            color=colours[stage_of[rank]],
            alpha=0.8,
        )
    if limit is not None:
        axes.axhline(limit / factor, color="black", linestyle="--")
    axes.set_xlabel(f"time in {unit}")
    axes.set_ylabel(f"memory in {size}")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title + _left_out(len(shown), len(memory)), loc="left")
    drawn = {stage_of[rank]: len(stages[stage_of[rank]]) for rank in shown}
    _stage_legend(figure, drawn, colours, limit is not None)
    return png(figure, _DPI)


def _stage_colours(count: int) -> list[Any]:
    """Returns up to ten distinct colours; for more stages a scale from first to last."""
    from matplotlib import colormaps

    if count <= 10:
        return [colormaps["tab10"](stage) for stage in range(count)]
    return [colormaps["viridis"](stage / (count - 1)) for stage in range(count)]


def _stage_legend(
    figure: Figure, ranks: Mapping[int, int], colours: Sequence[Any], limited: bool
) -> None:
    """Returns one entry per stage, with its number of ranks, and one for the limit."""
    from matplotlib.lines import Line2D

    handles = []
    for stage, count in sorted(ranks.items()):
        label = f"stage {stage}" + (f" ({count} ranks)" if count > 1 else "")
        handles.append(Line2D([], [], color=colours[stage], label=label))
    if limited:
        label = "memory of each rank"
        handles.append(Line2D([], [], color="black", linestyle="--", label=label))
    _legend(figure, handles)


# Chrome traces


def write_chrome(
    ranks: Timeline,
    path: Path,
    counters: Mapping[str, Mapping[int, StepCurve]] | None = None,
    marks: Mapping[str, float] | None = None,
) -> None:
    """Writes the `chrome_text`."""
    write_whole(path, chrome_text(ranks, counters, marks))


def chrome_text(
    ranks: Timeline,
    counters: Mapping[str, Mapping[int, StepCurve]] | None = None,
    marks: Mapping[str, float] | None = None,
) -> str:
    """The timeline as JSON for Perfetto (ui.perfetto.dev) or chrome://tracing.

    In the Trace Event Format: a complete event per action, per rank a counter for each name in
    `counters`, and a line across all ranks at each of `marks`. Times are in microseconds from the
    first event.
    """
    begin = min((events[0].begin for events in ranks.values() if events), default=0.0)
    written = [*_rank_entries(ranks, counters or {}, begin)]
    for name, time in (marks or {}).items():
        written.append(_entry(name, "i", 0, time - begin, s="g", tid=0))
    return json.dumps({"traceEvents": written, "displayTimeUnit": "ms"}) + "\n"


def _rank_entries(
    ranks: Timeline, counters: Mapping[str, Mapping[int, StepCurve]], begin: float
) -> Iterator[dict[str, Any]]:
    for rank, events in sorted(ranks.items()):
        label = {"name": _row_label(rank, events)}
        yield {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": label}
        for event in events:
            yield _entry(
                str(event.action),
                "X",
                rank,
                event.begin - begin,
                cat=STYLES[event.action.kind].name,
                dur=_microseconds(event.end - event.begin),
                tid=0,
                args={"minibatch": event.action.minibatch},
            )
        for name, curves in counters.items():
            for time, amount in curves.get(rank, ()):
                yield _entry(name, "C", rank, time - begin, args={name: amount})


def _entry(name: str, phase: str, rank: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "ph": phase, "ts": _microseconds(seconds), "pid": rank, **more}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# What the pictures share


def evenly(items: Sequence[_Item], most: int) -> list[_Item]:
    """Returns all items, or `most` of them, evenly spaced from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _left_out(shown: int, total: int) -> str:
    return f" ({shown} of {total} ranks)" if shown < total else ""


def _unit(seconds: float) -> tuple[float, str]:
    """Returns the factor from seconds to a unit that suits `seconds`, and the unit."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 2:
            return scale, unit
    return 1e6, "µs"


def _size(amount: float) -> tuple[float, str]:
    """Returns the number of bytes of a unit that suits `amount`, and the unit."""
    units = ("B", "kB", "MB", "GB", "TB")
    step = min(int(math.log(max(amount, 1.0), 1000)), len(units) - 1)
    return 1000.0**step, units[step]
