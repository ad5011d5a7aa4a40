"""Tables are printed whole at any width."""

from __future__ import annotations

import io

import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipedream.graph.tables import print_table

NUMBERS = [f"{1234.5 + column:.1f} ms" for column in range(9)]


def table(text: str = "a stage") -> Table:
    made = Table(title="What each rank did", caption="Planned: as profiled.", box=SIMPLE_HEAD)
    made.add_column("rank", no_wrap=True)
    made.add_column("of what")
    for number in range(9):
        made.add_column(f"heading {number}", justify="right", no_wrap=True)
    for rank in range(3):
        made.add_row(str(rank), text, *NUMBERS)
    return made


def printed(width: int, *, labels: int = 2, text: str = "a stage") -> list[str]:
    out = io.StringIO()
    print_table(Console(file=out, width=width), table(text), labels)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 81, 100, 120, 160, 200])
@pytest.mark.parametrize("text", ["a stage", "model.layers.0.attention ... model.layers.1.mlp"])
def test_no_heading_and_no_number_is_cut(width: int, text: str) -> None:
    """`late…`, `1.317 …` and `6.…` stood in the tables of --trace and --network."""
    lines = printed(width, text=text)
    whole = "\n".join(lines)
    assert "…" not in whole
    assert max(map(len, lines)) <= width
    for number, cell in enumerate(NUMBERS):
        assert f"heading {number}" in whole
        assert whole.count(cell) == 3


def test_what_does_not_fit_stands_below_beside_the_first_columns() -> None:
    lines = printed(80)
    heads = [line.split() for line in lines if "heading" in line]
    assert len(heads) > 1
    assert all(head[:3] == ["rank", "of", "what"] for head in heads)
    whole = "\n".join(lines)
    assert whole.count("What each rank did") == 1
    assert whole.index("Planned: as profiled.") > whole.rindex("heading")


def test_a_table_that_fits_is_one() -> None:
    assert sum("heading" in line for line in printed(160)) == 1
