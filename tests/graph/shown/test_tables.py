"""Tables are printed whole at any width."""

from __future__ import annotations

import io

import pytest
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipedream.graph.shown.tables import break_words, make_console, print_table

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


def test_the_caption_of_a_table_in_parts_is_as_wide_as_the_page() -> None:
    """Below a narrow last part it stood in six lines of one or two words."""
    out = io.StringIO()
    made = table()
    made.caption = "At its peak. Activations: what the backward passes need, as measured."
    print_table(Console(file=out, width=80), made)
    assert out.getvalue().splitlines()[-1].strip() == made.caption


@pytest.mark.parametrize(
    ("text", "width", "broken"),
    [
        ("model.layers.1.mlp.gate_proj: Linear", 20, "model.layers.1.mlp.\ngate_proj: Linear"),
        (
            "...2.self_attn.q_proj ... node168 Loss",
            12,
            "...2.\nself_attn.\nq_proj ... node168 Loss",
        ),
        ("a_long_name", 8, "a_long_\nname"),
        ("MultiheadAttention", 12, "MultiheadAtt\nention"),
        ("...layers", 4, "...l\nayer\ns"),
        ("fits here", 5, "fits here"),
    ],
)
def test_names_are_broken_at_their_dots(text: str, width: int, broken: str) -> None:
    """`model.embed_toke` and `ns` stood in two lines."""
    assert break_words(text, width) == broken
    assert break_words(text, 100) == text


@pytest.mark.parametrize("width", [60, 80])
def test_columns_of_text_are_wrapped_between_the_parts_of_a_name(width: int) -> None:
    made = Table(box=SIMPLE_HEAD)
    made.add_column("stage", no_wrap=True)
    made.add_column("first and last")
    made.add_column("time", no_wrap=True)
    made.add_row("0", "model.embed_tokens.projection.weights ... model.norm", 40 * "1")
    out = io.StringIO()
    print_table(Console(file=out, width=width), made)
    words = out.getvalue().split()
    assert {"model.norm", "..."} <= set(words)
    pieces = [word for word in words if word.startswith(("model.embed", "projection", "weights"))]
    assert "".join(pieces) == "model.embed_tokens.projection.weights"


def test_in_a_notebook_tables_go_to_whoever_collects_the_output() -> None:
    """rich displayed them by itself, and pipedream.optimize had a report without them."""
    assert not make_console().is_jupyter
