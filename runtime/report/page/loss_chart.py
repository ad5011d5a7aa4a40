"""The loss over time, as the coordinates of a small chart that the template draws as SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from pipedream.runtime.report.summary import held_out_lines

WIDTH, HEIGHT = 420, 200
"""Of the area between the axes."""

_MOST_POINTS = 210
"""Losses of several minibatches become one point where there are more."""

Points = Sequence[tuple[float, float]]


class Tick(NamedTuple):
    """A mark at `position` of an axis."""

    position: float
    text: str


@dataclass(frozen=True)
class LossChart:
    """Lines are texts such as `0.0,12.5 2.0,13.0`, with y counted downwards.

    `band` surrounds the highest and lowest losses of the minibatches behind each point; it is empty
    where each has one. `held_out` are the points of held-out losses.
    """

    line: str
    band: str
    held_out: Points
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    x_name: str
    width: int = WIDTH
    height: int = HEIGHT


class _Axis(NamedTuple):
    """A scale from the values `low` to `high` onto positions 0 to `length`."""

    low: float
    high: float
    length: float

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) * self.length

    def ticks(self) -> list[Tick]:
        """Returns at most seven ticks, at multiples of 1, 2 or 5 times a power of ten."""
        least = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [Tick(self.at(n * step), f"{n * step:.6g}") for n in range(first, last + 1)]


def loss_chart(run: Path, minibatches: int) -> LossChart | None:
    """The chart of metrics.jsonl and held_out.jsonl in the folder of a run whose epochs have so
    many minibatches; None with fewer than two finite losses.
    """
    losses = list(_losses(run / "metrics.jsonl", minibatches))
    if len(losses) < 2:
        return None
    size = -(-len(losses) // _MOST_POINTS)
    buckets = [losses[first : first + size] for first in range(0, len(losses), size)]
    means = [(fmean(x for x, _ in bucket), fmean(y for _, y in bucket)) for bucket in buckets]
    tried = [(each["epoch"], each["held_out_loss"]) for each in held_out_lines(run)]
    held_out = [point for point in tried if math.isfinite(point[1])]
    shown = [y for _, y in (*means, *held_out)]
    low, high = min(shown), max(shown)
    if not high - low > 1e-9 * abs(high):
        low, high = low - 0.5, high + 0.5
    several = losses[-1][0] > 1
    scale = 1 if several else minibatches
    x = _Axis(0.0, losses[-1][0] * scale, WIDTH)
    y = _Axis(low, high, HEIGHT)

    def placed(points: Points) -> Points:
        return [(x.at(a * scale), HEIGHT - y.at(b)) for a, b in points]

    return LossChart(
        line=_text(placed(means)),
        band=_text(placed(_band(buckets))) if len(losses) > len(buckets) else "",
        held_out=placed(held_out),
        x_ticks=x.ticks(),
        y_ticks=[Tick(HEIGHT - tick.position, tick.text) for tick in y.ticks()],
        x_name="epoch" if several else "minibatch",
    )


def _losses(path: Path, minibatches: int) -> Iterator[tuple[float, float]]:
    """Yields the epochs trained and the loss then, where it is finite."""
    with path.open(encoding="utf-8") as file:
        for each in map(json.loads, file):
            if math.isfinite(each["loss"]):
                yield each["epoch"] - 1 + (each["minibatch"] + 1) / minibatches, each["loss"]


def _band(buckets: Sequence[Points]) -> Points:
    """Returns a line around the buckets: along the highest losses, and back along the lowest."""
    upper = [(fmean(x for x, _ in bucket), max(y for _, y in bucket)) for bucket in buckets]
    lower = [(fmean(x for x, _ in bucket), min(y for _, y in bucket)) for bucket in buckets]
    return [*upper, *reversed(lower)]


def _text(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
