"""What pd-profile prints of a profile: its nodes in the order that is asked for, and the sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipedream.graph.units import show_bytes, show_seconds
from pipedream.profiler.layers import layer_names, layers_frame
from pipedream.profiler.profile import Profile
from pipedream.profiler.quantity import QUANTITIES

if TYPE_CHECKING:
    import pandas as pd

_HEAVIEST = 10
_PIPED_WIDTH = 120
_PER_COLUMN = 11  # characters
_WIDEST_LAYER = 40


def make_console() -> Console:
    """The terminal, or a page of fixed width where the output goes elsewhere."""
    # Without emoji=False, `transformers:llama: ...` is printed with a llama in it.
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


def print_report(profile: Profile, sort: str = "time", top: int | None = None) -> None:
    """Prints the `top` nodes with most of `sort` (see `quantity`; or all nodes in their order, for
    "order"), then the totals.

    `top`: 0 for all; by default ten, or all in their order.
    """
    console = make_console()
    frame = layers_frame(profile)
    if top is None:
        top = 0 if sort == "order" else _HEAVIEST
    console.print(_table(profile, frame, sort, top or len(frame), console.width))
    console.print(_summary(profile), soft_wrap=True)


def _table(profile: Profile, frame: pd.DataFrame, sort: str, top: int, width: int) -> Table:
    names = layer_names(frame)
    by = "time" if sort == "order" else sort
    values = frame[QUANTITIES[by].column]
    rows = frame if sort == "order" else frame.loc[values.sort_values(ascending=False, kind="stable").index]
    table = Table(title=_title(profile, sort, top), title_justify="left", box=SIMPLE_HEAD)
