"""Pictures of report.html: timelines as data URIs, and bars of what ranks spent their time on."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from pipedream.graph.plan import workers_by_rank
from pipedream.graph.timeline import STYLES, evenly
from pipedream.runtime.report.page.finished_run import FinishedRun
from pipedream.runtime.report.utilisation import COLUMNS

TIMELINE = "timeline.png"
"""File name in the folder of a run and, after pd-optimize --timeline, of a plan."""

_MOST_BYTES = 350_000
"""Two pictures as base64 leave the page below a megabyte."""

_COLOURS = 64
"""Those of the passes, and the shades that smooth the edges of text."""

_MOST_BARS = 32


class BarPart(NamedTuple):
    """A part of a bar, of this share of its length."""

    name: str
    share: float
    colour: str


class Bar(NamedTuple):
    """What a rank spent its time on."""

    rank: int
    parts: list[BarPart]


def expected_timeline(run: FinishedRun) -> str | None:
    """Returns the picture beside the plan; None if there is none, or it is of an earlier plan.

    pd-optimize writes the picture after the plan.
    """
    folder = run.job.plan_folder
    if folder is None or not run.job.as_planned or not (folder / TIMELINE).is_file():
        return None
    picture = folder / TIMELINE
    if picture.stat().st_mtime < (folder / "plan.json").stat().st_mtime:
        return None
    return data_uri(picture)


def data_uri(picture: Path) -> str | None:
    """Returns the picture with few colours, a third of the bytes; None without one, or if it is
    still large.
    """
    if not picture.is_file():
        return None
    from PIL import Image

    small = BytesIO()
    with Image.open(picture, formats=["PNG"]) as image:
        few = image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    content = small.getvalue()
    if len(content) > _MOST_BYTES:
        return None
    return f"data:image/png;base64,{b64encode(content).decode('ascii')}"


def bars(run: FinishedRun) -> list[Bar]:
    """Returns a bar for each rank, of the same parts; of more than 32 for evenly spaced ones."""
    ranks = sorted(workers_by_rank(run.job.plan.rank_assignment))
    shares = {rank: run.spent.shares(rank) for rank in evenly(ranks, _MOST_BARS)}
    colours = {
        name: STYLES[min(kinds)].colour
        for name, kinds in COLUMNS.items()
        if any(each[name] for each in shares.values())
    }
    return [
        Bar(rank, [BarPart(name, each[name], colour) for name, colour in colours.items()])
        for rank, each in shares.items()
    ]
