"""What a checkpoint knows of learning rates and loss scales."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from pipedream.graph.errors import UserError, worded
from pipedream.runtime.checkpoint.files import State
from pipedream.runtime.optim.stepping import Progress


def progress_of(path: Path, saved: State) -> Progress:
    """What the checkpoint at `path` knows of rates and scales. Raises UserError."""
    try:
        return Progress.model_validate(saved.training)
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(
            f"{path / 'state.json'}: training.{field}: {worded(error.errors()[0])}"
        ) from error
