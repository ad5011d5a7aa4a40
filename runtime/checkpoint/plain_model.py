"""The plain model with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

import torch
from torch import nn

from pipedream.capture.errors.capture_errors import blaming_modules
from pipedream.capture.loss import Loss, Metric
from pipedream.capture.sources.minibatch import Dataset
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import RunConfig
from pipedream.runtime.checkpoint.files import load_all
from pipedream.runtime.data.reader import in_order
from pipedream.runtime.engine.evaluation import EvaluationTotals


def evaluate(
    model: nn.Module,
    path: Path,
    held_out: Dataset,
    config: RunConfig,
    loss: Loss,
    device: torch.device,
    metrics: Mapping[str, Metric],
) -> dict[str, float]:
    """Loads the checkpoint at `path` into `model` and evaluates it in eval mode, on this worker.

    Returns `EvaluationTotals.result`. Raises UserError if the checkpoint is of another model.
    """
    load_plain(model, path)
    model.to(device).eval()
    totals = EvaluationTotals()
    with torch.no_grad():
        for batch in in_order(held_out, config, device):
            with blaming_modules(config.model.source, model):
                output = model(*batch.inputs)
            totals.add_outputs(output, batch.target, len(batch.inputs[0]), loss, metrics)
    return EvaluationTotals.result([astuple(totals)])


def load_plain(model: nn.Module, path: Path) -> None:
    """Loads a checkpoint into the plain model; tied parameters have their first name."""
    tensors = load_all(path)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in own:
                raise UserError(f"{path}: {name} is not in this model")
            own[name].copy_(tensor)


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors of the state_dict, by name; modules may keep other things there."""
    return {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
