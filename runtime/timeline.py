"""What happened when: events of a run, their text form, and a picture of them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipedream.graph.command import UserError
from pipedream.runtime.schedule import Action, Kind, parse_action, show_worker

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PASSES = (Kind.FORWARD, Kind.BACKWARD)
_HEADER = ["rank", "action", "begin_seconds", "end_seconds"]
_WIDTH = 14.0  # inches
_DPI = 110
_POINTS_PER_DIGIT = 5.5


class Event(NamedTuple):
    """An action and when it ran, in seconds of any clock that all ranks of a run share."""

    action: Action
    begin: float
    end: float


class _Style(NamedTuple):
    name: str
    colour: str
    text: str = "black"


# Okabe and Ito's colours, which colour-blind people tell apart.
_STYLES = {
    Kind.FORWARD: _Style("forward", "#0072B2", "white"),
    Kind.BACKWARD: _Style("backward", "#E69F00"),
    Kind.ALL_REDUCE: _Style("all-reduce", "#CC79A7"),
    Kind.UPDATE: _Style("update", "#000000", "white"),
    Kind.SEND_ACTIVATION: _Style("send", "#009E73"),
    Kind.SEND_GRADIENT: _Style("send", "#009E73"),
    Kind.RECV_ACTIVATION: _Style("wait for a message", "#DDDDDD"),
    Kind.RECV_GRADIENT: _Style("wait for a message", "#DDDDDD"),
}


def write_trace(ranks: Mapping[int, Sequence[Event]], path: Path) -> None:
    """A CSV line for each event: rank, action as `2F0`, begin and end in seconds."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_HEADER)
        for rank, events in sorted(ranks.items()):
            for event in events:
                writer.writerow([rank, event.action, f"{event.begin:.9f}", f"{event.end:.9f}"])


def read_trace(path: Path) -> dict[int, list[Event]]:
    """What `write_trace` wrote. Raises UserError `FILE:LINE: what is wrong`."""
    ranks: dict[int, list[Event]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        if next(reader, None) != _HEADER:
            raise UserError(f"{path}:1: expected the columns {','.join(_HEADER)}")
        for row in reader:
            try:
                rank, action, begin, end = row
                event = Event(parse_action(action), float(begin), float(end))
                ranks.setdefault(int(rank), []).append(event)
            except ValueError as error:
                raise UserError(f"{path}:{reader.line_num}: {error}") from error
    return ranks


def draw(
    ranks: Mapping[int, Sequence[Event]],
    path: Path,
    title: str,
    first: int = 0,
    count: int = 12,
) -> None:
    """A Gantt chart (PNG) of minibatches `first` to `first + count - 1`, a row for each rank.

    The window reaches from the begin of the first of their passes to the end of the last, and shows
    whatever else ran meanwhile. A minibatch's number stands in its box where it fits.
    """
    from matplotlib.figure import Figure

    begin, end = _window(ranks, range(first, first + count))
    scale, unit = _unit(end - begin)
    figure = Figure(figsize=(_WIDTH, 2.0 + 0.5 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, (end - begin) * scale)
    for row, rank in enumerate(sorted(ranks)):
        shown = [event for event in ranks[rank] if event.end > begin and event.begin < end]
        _draw_row(axes, row, shown, begin, scale)
    axes.set_xlabel(f"time in {unit}")
    labels = [f"rank {rank}: {_worker(ranks[rank])}" for rank in sorted(ranks)]
    axes.set_yticks(range(len(ranks)), labels)
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{title}, {_which(ranks, first, count)}", loc="left")
    _legend(figure, {event.action.kind for events in ranks.values() for event in events})
    figure.savefig(path, dpi=_DPI)


def _window(ranks: Mapping[int, Sequence[Event]], minibatches: range) -> tuple[float, float]:
    passes = [
        event
        for events in ranks.values()
        for event in events
        if event.action.kind in PASSES and event.action.minibatch in minibatches
    ]
    if not passes:
        return 0.0, 1.0
    return min(event.begin for event in passes), max(event.end for event in passes)


def _unit(seconds: float) -> tuple[float, str]:
    """What to multiply seconds by, so that `seconds` is a number of handy size."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 2:
            return scale, unit
    return 1e6, "µs"


def _draw_row(axes: Axes, row: int, events: Sequence[Event], origin: float, scale: float) -> None:
    """Passes fill the row; what stands between them is lower, so that it does not hide them."""
    for kind, style in _STYLES.items():
        spans = [
            ((event.begin - origin) * scale, (event.end - event.begin) * scale)
            for event in events
            if event.action.kind is kind
        ]
        height, edge = (0.8, "white") if kind in PASSES else (0.4, "none")
        axes.broken_barh(
            spans, (row - height / 2, height), facecolors=style.colour, edgecolors=edge
        )
    points_per_unit = 0.9 * _WIDTH * 72 / axes.get_xlim()[1]
    for event in events:
        text = str(event.action.minibatch)
        room = (event.end - event.begin) * scale * points_per_unit
        if event.action.kind in PASSES and room > _POINTS_PER_DIGIT * (len(text) + 0.5):
            middle = ((event.begin + event.end) / 2 - origin) * scale
            colour = _STYLES[event.action.kind].text
            axes.text(
                middle, row, text, ha="center", va="center", color=colour, size=8, clip_on=True
            )


def _worker(events: Sequence[Event]) -> str:
    if not events:
        return "nothing to do"
    action = events[0].action
    return f"stage {show_worker((action.stage, action.replica))}"


def _which(ranks: Mapping[int, Sequence[Event]], first: int, count: int) -> str:
    """Which of how many minibatches are shown, in words."""
    numbers = [
        event.action.minibatch
        for events in ranks.values()
        for event in events
        if event.action.kind in PASSES
    ]
    total = max(numbers, default=-1) + 1
    if first == 0 and count >= total:
        return f"all {total} minibatches"
    return f"minibatches {first} to {min(first + count, total) - 1} of {total}"


def _legend(figure: Figure, kinds: set[Kind]) -> None:
    from matplotlib.patches import Patch

    colours = {style.name: style.colour for kind, style in _STYLES.items() if kind in kinds}
    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    if handles:
        figure.legend(
            handles=handles, ncols=len(handles), frameon=False, loc="outside lower center"
        )
