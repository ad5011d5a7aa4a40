"""Whether a loop of the user's own calls a pipeline in the precision that it has."""

from __future__ import annotations

import torch

from pipedream.capture.compute_settings import Precision
from pipedream.graph.errors import UserError


def check_precision(precision: Precision) -> None:
    """Raises UserError if the loop is in another than that of the pipeline."""
    kind, own = precision.device.type, precision.autocast
    theirs = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    if torch.is_autocast_enabled(kind) and theirs != own:
        remedy = f"give it autocast={theirs!r} when you make it, or call it outside"
        if theirs == "float16":
            remedy = "use bfloat16: gradients are there before a scaler scales the loss"
        raise UserError(
            f"the pipeline is called within torch.autocast of {theirs}, and has types of its"
            f" own: {remedy}"
        )
