"""Tables in a terminal, whole: what does not fit beside stands below, and no number is cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

_PIPED_WIDTH = 120
_LEAST = 12
"""Characters to which a column of text may be wrapped."""
_BOUNDLESS = 100_000


def make_console(file: TextIO | None = None) -> Console:
    """Returns a console of the terminal's width, or a fixed one if redirected or for `file`."""
    from rich.console import Console

    # Without emoji=False, `transformers:llama: ...` is printed with an emoji. In a notebook rich
    # would display each table by itself, past the file; and there FORCE_COLOR is set, which is for
    # who looks at it.
    console = Console(
        file=file,
        highlight=False,
        markup=False,
        emoji=False,
        force_jupyter=False,
        force_terminal=None if file is None else False,
    )
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


def print_table(console: Console, table: Table, labels: int = 1) -> None:
    """Prints the table. Closer if it does not fit; if that does not help, the columns that are too
    many stand below, each time beside the first `labels`. The caption of such parts is as wide as
    the console.
    """
    for column in table.columns:
        column.overflow = "fold"
    if _width(console, table, table.columns) > console.width:
        table.padding, table.show_edge, table.pad_edge = (0, 1, 0, 0), False, False
    parts = list(_parts(console, table, labels))
    caption, several = table.caption, len(parts) > 1
    for number, columns in enumerate(parts):
        _fold(console, table, columns)
        console.print(_part(table, columns, title=number == 0, caption=not several))
    if several and caption:
        console.print(caption, style="table.caption")


def print_line(console: Console, line: str) -> None:
    """Prints the line as it is: not wrapped, and nothing in it is markup."""
    console.file.write(f"{line}\n")
    console.file.flush()


def end_of(path: str, width: int) -> str:
    """Returns the path; if it is wider, its end, which tells more, cut at a dot."""
    if len(path) <= width:
        return path
    end = path[3 - width :]
    return "..." + (end.partition(".")[2] or end)


def break_words(text: str, width: int) -> str:
    """Returns the text with each word of more than `width` characters broken, if possible behind a
    dot, a slash or an underscore: `model.layers.0.` and `mlp.gate_proj`.
    """
    return re.sub(r"\S+", lambda word: "\n".join(_pieces(word[0], width)), text)


def _pieces(word: str, width: int) -> Iterator[str]:
    while len(word) > width:
        best = max(word.rfind(mark, 0, width) for mark in "./") + 1
        best = best or word.rfind("_", 0, width) + 1 or width
        if not word[:best].strip("."):  # of "...layers.0" nothing but dots
            best = width
        yield word[:best]
        word = word[best:]
    yield word


def _fold(console: Console, table: Table, columns: Sequence[Column]) -> None:
    """Breaks the words of the column of text, if there is just one, where it will be wrapped."""
    folding = [column for column in columns if not column.no_wrap and _spare(console, column)]
    if len(folding) == 1:
        width = _LEAST + console.width - _width(console, table, columns)
        folding[0]._cells = [
            break_words(cell, width) if isinstance(cell, str) else cell for cell in folding[0].cells
        ]


def _parts(console: Console, table: Table, labels: int) -> Iterator[list[Column]]:
    first, part = table.columns[:labels], list(table.columns[:labels])
    for column in table.columns[labels:]:
        if len(part) > labels and _width(console, table, [*part, column]) > console.width:
            yield part
            part = list(first)
        part.append(column)
    yield part


def _width(console: Console, table: Table, columns: Sequence[Column]) -> int:
    """Returns the characters that these columns take at least, side by side."""
    from rich.measure import Measurement

    boundless = console.options.update(width=_BOUNDLESS)
    part = _part(table, columns, title=False, caption=False)
    widest = Measurement.get(console, boundless, part).maximum
    return widest - sum(_spare(console, column) for column in columns if not column.no_wrap)


def _spare(console: Console, column: Column) -> int:
    """Returns by how many characters a column of text can be wrapped."""
    texts = [console.render_str(str(cell)) for cell in (column.header, *column.cells)]
    lines = (line.cell_len for text in texts for line in text.split("\n"))
    return max(0, max(lines, default=0) - _LEAST)


def _part(table: Table, columns: Sequence[Column], title: bool, caption: bool) -> Table:
    """Returns the table with these columns alone."""
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
