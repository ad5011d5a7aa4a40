"""The quantities of nodes in tables, pictures and comparisons, by the names of --sort."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipedream.graph.units import show_bytes, show_seconds


@dataclass(frozen=True)
class Quantity:
    """A number for each node, in `column` of layers.csv; `grows`: with the batch size.

    `heading`: of its column in a terminal. A time is the sum over its `passes`, whose quartiles are
    in layers.csv, such as `forward_lower_seconds`.
    """

    column: str
    heading: str
    show: Callable[[float], str]
    grows: bool = True
    passes: tuple[str, ...] = ()


QUANTITIES: Mapping[str, Quantity] = {
    "time": Quantity("seconds", "time", show_seconds, passes=("forward", "backward")),
    "forward": Quantity("forward_seconds", "forward", show_seconds, passes=("forward",)),
    "backward": Quantity("backward_seconds", "backward", show_seconds, passes=("backward",)),
    "activations": Quantity("output_bytes", "activa-\ntions", show_bytes),
    "saved": Quantity("saved_bytes", "saved", show_bytes),
    "parameters": Quantity("parameter_bytes", "para-\nmeters", show_bytes, grows=False),
    "workspace": Quantity("workspace_bytes", "work-\nspace", show_bytes),
}

ORDERS = (*QUANTITIES, "order")
"""The choices of --sort: a quantity, or the order of execution."""
