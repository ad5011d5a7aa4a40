"""The table of a profile, a row for each node in order of execution, and its quantities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipedream.graph.units import show_bytes, show_seconds

if TYPE_CHECKING:
    import pandas as pd

    from pipedream.graph.profile import Profile, ProfiledNode


_PASSES = ("forward", "backward", "backward_input", "backward_weight")


def _row(node: ProfiledNode) -> dict[str, Any]:
    """Returns seconds and bytes per minibatch, as in profile.json; None if not measured."""
    row = {name: getattr(node, name) for name in ("id", "module", "op", "description")}
    row["seconds"] = node.forward_seconds.median + node.backward_seconds.median
    for name in _PASSES:
        quartiles = getattr(node, f"{name}_seconds")
        for middle, quartile in (("", "median"), ("_lower", "lower"), ("_upper", "upper")):
            row[f"{name}{middle}_seconds"] = getattr(quartiles, quartile, None)
    row["output_bytes"] = sum(tensor.bytes for tensor in node.outputs)
    for name in ("saved", "kept", "workspace", "parameter"):
        row[f"{name}_bytes"] = getattr(node, f"{name}_bytes")
    return row


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
    "bi": Quantity("backward_input_seconds", "BI", show_seconds, passes=("backward_input",)),
    "bw": Quantity("backward_weight_seconds", "BW", show_seconds, passes=("backward_weight",)),
    "activations": Quantity("output_bytes", "activa-\ntions", show_bytes),
    "saved": Quantity("saved_bytes", "saved", show_bytes),
    "parameters": Quantity("parameter_bytes", "para-\nmeters", show_bytes, grows=False),
    "workspace": Quantity("workspace_bytes", "work-\nspace", show_bytes),
}

ORDERS = (*QUANTITIES, "order")
"""The choices of --sort: a quantity, or the order of execution."""


def layers_frame(profile: Profile) -> pd.DataFrame:
    """Returns for each node its seconds and bytes, and `share`: of the forward plus backward time
    of all nodes. Values that were not measured are NaN.
    """
    import pandas as pd

    frame = pd.DataFrame(map(_row, profile.nodes))
    for name in frame.columns[frame.columns.str.endswith(("_bytes", "_seconds"))]:
        frame[name] = pd.to_numeric(frame[name])  # turns None into NaN
    frame["share"] = frame["seconds"] / (frame["seconds"].sum() or 1.0)
    return frame


def layer_names(frame: pd.DataFrame) -> list[str]:
    """Returns a label for each row: `layer1.0.conv1: Conv2d`, or `Input0` without a module."""
    return [
        f"{module}: {op}" if module else op
        for module, op in zip(frame["module"], frame["op"], strict=True)
    ]


def shown_layers(profile: Profile) -> pd.DataFrame:
    """Returns a row for each layer in order of execution, its quantities in words with units."""
    import pandas as pd

    frame = layers_frame(profile)
    measured = (each for each in QUANTITIES.values() if frame[each.column].notna().all())
    return pd.DataFrame(
        {
            "node": frame["id"],
            "layer": layer_names(frame),
            **{
                quantity.heading.replace("-\n", ""): frame[quantity.column].map(quantity.show)
                for quantity in measured
            },
            "share": frame["share"].map("{:.1%}".format),
        }
    )
