"""The plain model with the weights of a checkpoint, evaluated on one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipedream.capture.loss import Loss, accuracy
from pipedream.capture.sources.minibatch import Dataset
from pipedream.capture.sources.user_code import blaming
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import RunConfig
from pipedream.runtime.checkpoint.files import load_all
from pipedream.runtime.data.reader import in_order


def evaluate(
    model: nn.Module,
    path: Path,
    held_out: Dataset,
    config: RunConfig,
    loss: Loss,
    device: torch.device,
) -> dict[str, Any]:
    """Loads the checkpoint at `path` into `model` and evaluates it in eval mode, on this one
    worker.

    `held_out_loss` is the mean over the examples; `held_out_accuracy` the share of right
    predictions, if the model returns logits of classes. Raises UserError if the checkpoint is not
    this model's.
    """
    load_plain(model, path)
    model.to(device).eval()
    total, examples, right, predictions = 0.0, 0, 0, 0
    with torch.no_grad():
        for batch in in_order(held_out, config, device):
            with blaming(config.model.source):
                output = model(*batch.inputs)
            count = len(batch.inputs[0])
            total += loss(output, batch.target).item() * count
            examples += count
            hit = accuracy(output, batch.target)
            right, predictions = (right + hit[0], predictions + hit[1]) if hit else (0, 0)
    result: dict[str, Any] = {"held_out_loss": total / examples}
    return result | ({"held_out_accuracy": right / predictions} if predictions else {})


def load_plain(model: nn.Module, path: Path) -> None:
    """Loads a checkpoint into the plain model; tied parameters have their first name."""
    tensors = load_all(path)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in own:
                raise UserError(f"{path}: {name} is not in this model")
            own[name].copy_(tensor)
