"""A picture of a profile: bars and cumulative curves over its layers, in order of execution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from pipedream.graph.command import whole
from pipedream.graph.profile import Profile
from pipedream.profiler.report.layers import QUANTITIES, layer_names, layers_frame

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    _Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

_DPI = 120
_NARROWEST, _WIDEST = 11.0, 18.0  # inches
_MARGIN = 1.6  # inches for the scales at the sides
_PER_NODE = 0.17
_PER_LABEL = 0.14  # with less, labels touch
_PER_CHARACTER = 0.06
_LONGEST_LABEL = 48  # characters
_LONGEST_IN_HEADING = 32
_MOST_GAPS = 120  # gaps of less than a pixel look uneven


@dataclass(frozen=True)
class _Bars:
    """A quantity as bars, stacked on the previous ones or narrower `inside` them."""

    quantity: str
    label: str
    colour: str
    inside: bool = False


# Okabe and Ito's colours, light before dark: distinct for colour-blind readers and in grey.
_PANELS: Mapping[str, tuple[_Bars, ...]] = {
    "time": (_Bars("forward", "forward", "#56B4E9"), _Bars("backward", "backward", "#0072B2")),
    "activations": (
        _Bars("activations", "output", "#E69F00"),
        _Bars("saved", "saved for backward", "#7A3300", inside=True),
    ),
    "parameters": (_Bars("parameters", "parameters", "#009E73"),),
}


class _LabelledNodes(NamedTuple):
    """Holds neighbouring nodes under one label."""

    begin: int
    nodes: int
    label: str

    @property
    def middle(self) -> float:
        return self.begin + (self.nodes - 1) / 2


def draw_layers(profile: Profile, path: Path) -> None:
    """Draws the time, activations and parameters of every node of `profile` (PNG).

    Each has a panel with bars and the cumulative share. Quantities that were not measured are left
    out.
    """
    from matplotlib.figure import Figure

    frame = layers_frame(profile)
    measured = frame.columns[frame.notna().all()]
    panels = {
        name: known
        for name, bars in _PANELS.items()
        if (known := [bar for bar in bars if QUANTITIES[bar.quantity].column in measured])
    }
    width = min(max(_MARGIN + _PER_NODE * len(frame), _NARROWEST), _WIDEST)
    runs = _runs(frame, slots=int((width - _MARGIN) / _PER_LABEL))
    labels = _PER_CHARACTER * max(len(run.label) for run in runs)
    figure = Figure(figsize=(width, 2.4 * len(panels) + labels + 0.5), layout="constrained")
    title = f"{profile.title}: {len(frame)} nodes"
    figure.suptitle(title, parse_math=False)
    rows = list(figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0])
    for axes, (name, bars) in zip(rows, panels.items(), strict=True):
        _draw_panel(axes, name, frame, bars)
    _label_layers(rows, runs, len(frame), _PER_LABEL * len(frame) / (width - _MARGIN))
    with whole(path) as fresh:
        figure.savefig(fresh, dpi=_DPI)


def _draw_panel(axes: Axes, name: str, frame: pd.DataFrame, bars: Sequence[_Bars]) -> None:
    from matplotlib.ticker import EngFormatter, PercentFormatter

    share = axes.twinx()
    whole = _draw_bars(axes, share, frame, bars)
    axes.yaxis.set_major_formatter(EngFormatter("s" if name == "time" else "B"))
    share.yaxis.set_major_formatter(PercentFormatter(1.0))
    share.set_ylim(0.0, 1.04)
    share.set_ylabel("share so far")
    axes.set_title(_heading(name, frame, whole), loc="left", fontsize=10)
    handles = [part for each in (axes, share) for part in each.get_legend_handles_labels()[0]]
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles),
        frameon=False, fontsize=9, borderaxespad=0.2, handlelength=1.5, columnspacing=1.2,
    )  # fmt: skip
    for each in (axes, share):
        each.spines["top"].set_visible(False)


def _draw_bars(axes: Axes, share: Axes, frame: pd.DataFrame, bars: Sequence[_Bars]) -> _Numbers:
    """Draws the bars, and curves of the inside and the stacked ones; returns the stacked sums."""
    wide = 0.85 if len(frame) <= _MOST_GAPS else 1.0
    stacked = np.zeros(len(frame))
    for bar in bars:
        values = frame[QUANTITIES[bar.quantity].column].to_numpy(dtype=float)
        if bar.inside:
            _draw_rectangles(axes, values, np.zeros(len(frame)), wide / 2, bar)
            _draw_curve(share, values, bar.colour, "--")
        else:
            _draw_rectangles(axes, values, stacked, wide, bar)
            stacked = stacked + values
    _draw_curve(share, stacked, "#333333", "-")
    return stacked


def _draw_rectangles(
    axes: Axes, heights: _Numbers, bottoms: _Numbers, width: float, bar: _Bars
) -> None:
    """Draws a bar for each node, as one collection: a patch for each takes a millisecond."""
    from matplotlib.collections import PolyCollection

    places = np.arange(len(heights), dtype=float)
    left, right, top = places - width / 2, places + width / 2, bottoms + heights
    corners = [(left, bottoms), (left, top), (right, top), (right, bottoms)]
    vertices = np.stack([np.column_stack(each) for each in corners], axis=1)
    axes.add_collection(PolyCollection(list(vertices), facecolors=bar.colour, label=bar.label))
    axes.autoscale_view()
    axes.set_ylim(bottom=0.0)


def _draw_curve(axes: Axes, values: _Numbers, colour: str, line: str) -> None:
    """Draws the cumulative share up to each node; nothing if the total is zero."""
    if values.sum() > 0:
        share = np.cumsum(values) / values.sum()
        axes.plot(share, line, color=colour, linewidth=1.2, label="so far")


def _heading(name: str, frame: pd.DataFrame, values: _Numbers) -> str:
    """Returns `time: 934 ms, most in lm_head: Linear (60%)`."""
    whole, heaviest = float(values.sum()), int(values.argmax())
    shown = f"{name}: {QUANTITIES[name].show(whole)}"
    if not whole:
        return shown
    most = _shortened(layer_names(frame)[heaviest], _LONGEST_IN_HEADING)
    return f"{shown}, most in {most} ({values[heaviest] / whole:.0%})"


def _label_layers(
    rows: Sequence[Axes], runs: Sequence[_LabelledNodes], count: int, distance: float
) -> None:
    """Writes names, `distance` of `count` nodes apart or more, and lines where a run begins."""
    chosen = _apart(runs, distance)
    rows[-1].set_xticks(
        [run.middle for run in chosen], [run.label for run in chosen], rotation=90, fontsize=7
    )
    each = len(runs) == count
    for axes in rows:
        axes.set_xlim(-0.6, count - 0.4)
        axes.tick_params(axis="x", length=2 if each else 0)
        for run in runs[1:] if not each else ():
            axes.axvline(run.begin - 0.5, color="#BBBBBB", linewidth=0.5, zorder=0)


def _runs(frame: pd.DataFrame, slots: int) -> list[_LabelledNodes]:
    """Labels each node if `slots` are enough, else runs of nodes of one module, as deep as fits."""
    names = layer_names(frame)
    best = list(_neighbours(range(len(frame)), names))
    if len(frame) <= slots:
        return best
    paths = [module.split(".") for module in frame["module"]]
    for depth in range(1, max(map(len, paths)) + 1):
        modules = [".".join(path[:depth]) for path in paths]
        runs = list(_neighbours(modules, [a or b for a, b in zip(modules, names, strict=True)]))
        if len(runs) > slots:
            break
        best = runs
    return best


def _neighbours(keys: Iterable[object], labels: Sequence[str]) -> Iterator[_LabelledNodes]:
    begin = 0
    for _, group in groupby(keys):
        nodes = len(list(group))
        yield _LabelledNodes(begin, nodes, _shortened(labels[begin], _LONGEST_LABEL))
        begin += nodes


def _apart(runs: Sequence[_LabelledNodes], distance: float) -> list[_LabelledNodes]:
    """Returns the runs to name so that names do not touch; large runs first."""
    chosen: list[_LabelledNodes] = []
    for run in sorted(runs, key=lambda run: -run.nodes):
        if all(abs(run.middle - other.middle) >= distance for other in chosen):
            chosen.append(run)
    return chosen


def _shortened(name: str, most: int) -> str:
    """Shortens a name from its start, since its end says more."""
    return name if len(name) <= most else "..." + name[3 - most :]
