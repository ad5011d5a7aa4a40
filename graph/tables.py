"""Tables in a terminal, whole: what does not fit beside stands below, and no number is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

_PIPED_WIDTH = 120
_LEAST = 12
"""Characters to which a column of text may be wrapped."""
_BOUNDLESS = 100_000


def make_console() -> Console:
    """A console of the terminal's width, or of a fixed width if the output is redirected."""
    from rich.console import Console

    # Without emoji=False, `transformers:llama: ...` is printed with an emoji.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


def print_table(console: Console, table: Table, labels: int = 1) -> None:
    """Prints the table. Closer if it does not fit; if that does not help, the columns that are too
    many stand below, each time beside the first `labels`.
    """
    for column in table.columns:
        column.overflow = "fold"
    if _width(console, table, table.columns) > console.width:
        table.padding, table.show_edge, table.pad_edge = (0, 1, 0, 0), False, False
    parts = list(_parts(console, table, labels))
    for number, columns in enumerate(parts):
        last = number == len(parts) - 1
        console.print(_part(table, columns, title=number == 0, caption=last))


def _parts(console: Console, table: Table, labels: int) -> Iterator[list[Column]]:
    first, part = table.columns[:labels], list(table.columns[:labels])
    for column in table.columns[labels:]:
        if len(part) > labels and _width(console, table, [*part, column]) > console.width:
            yield part
            part = list(first)
        part.append(column)
    yield part


def _width(console: Console, table: Table, columns: Sequence[Column]) -> int:
    """The characters that these columns take at least, side by side."""
    from rich.measure import Measurement

    boundless = console.options.update(width=_BOUNDLESS)
    part = _part(table, columns, title=False, caption=False)
    widest = Measurement.get(console, boundless, part).maximum
    return widest - sum(_spare(console, column) for column in columns if not column.no_wrap)


def _spare(console: Console, column: Column) -> int:
    """By so many characters a column of text can be wrapped."""
    texts = [console.render_str(str(cell)) for cell in (column.header, *column.cells)]
    lines = (line.cell_len for text in texts for line in text.split("\n"))
    return max(0, max(lines, default=0) - _LEAST)


def _part(table: Table, columns: Sequence[Column], title: bool, caption: bool) -> Table:
    """The table with these columns alone."""
    if len(columns) == len(table.columns) and title:
        return table
    from rich.table import Table

    part = Table(
        title=table.title if title else None,
        caption=table.caption if caption else None,
        title_justify=table.title_justify,
        caption_justify=table.caption_justify,
        box=table.box,
        show_edge=table.show_edge,
        pad_edge=table.pad_edge,
        padding=table.padding,
    )
    for column in columns:
        part.add_column(
            column.header, justify=column.justify, no_wrap=column.no_wrap, overflow="fold"
        )
    for row, cells in zip(table.rows, zip(*(c.cells for c in columns), strict=True), strict=True):
        part.add_row(*cells, style=row.style)
    return part
