"""Tables of layers that fit the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipedream.graph.tables import break_words

_GAP = 2  # between columns
_HEAVIEST = 10


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
