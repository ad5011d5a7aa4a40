"""A checkpoint as one file that the plain model loads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from pipedream.graph.errors import UserError
from pipedream.runtime.checkpoint.plain_model import load_plain


def export(model: nn.Module, checkpoint: Path, target: Path) -> None:
    """Writes the checkpoint as a safetensors file for `model.load_state_dict`, all at once.

    What the pipeline does not hold (a parameter that no output depends on) is as in `model`: as the
    run's seed made it, if `load_config_model` did. A tied weight is there under each of its names.
    `model` is the plain one; it has the weights afterwards. Raises UserError if the checkpoint is
    not this model's, or the disk refuses.
    """
    load_plain(model, checkpoint)
    state = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
    partial = target.with_name(f"{target.name}.partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(mode)  # it makes files for their owner alone
        partial.replace(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--export {target}: cannot be written: {reason}") from error
