"""Tables of layers that fit the width of a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_PIPED_WIDTH = 120
_GAP = 2  # between columns
_HEAVIEST = 10


def make_console() -> Console:
    """The terminal, or a page of fixed width where the output goes elsewhere."""
    # Without emoji=False, `transformers:llama: ...` is printed with a llama in it.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


def how_many(sort: str, top: int | None) -> int | None:
    """Rows to show: `top`, all (None) for 0; by default ten, or all in the order of execution."""
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
    """Columns of text and of numbers, by their headings; the last text folds.

    Where that would leave it less than a third of `width`, and it needs more, columns of `spare`
    are left out, from the first on.
    """
    *narrow, wide = labels.values()
    room = width - min(max(map(len, wide), default=0), width // 3)
    room -= sum(_width(heading, labels[heading]) for heading in list(labels)[:-1])
    widths = {heading: _width(heading, cells) for heading, cells in numbers.items()}
    for heading in spare:
        if sum(widths.values()) > room:
            widths.pop(heading, None)
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
    for row in zip(*narrow, wide, *(numbers[heading] for heading in widths), strict=True):
        table.add_row(*row)
    return table


def _width(heading: str, cells: Iterable[str]) -> int:
    """Characters that a column takes, with the gap beside it."""
    return max(map(len, (*heading.split("\n"), *cells))) + _GAP
