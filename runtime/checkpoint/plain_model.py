"""The plain model with the weights of a checkpoint: evaluated, or written as one file."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from pipedream.capture.loss import Loss, accuracy
from pipedream.capture.sources.load import load_config_model
from pipedream.capture.sources.minibatch import Dataset
from pipedream.capture.sources.user_code import blaming
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import RunConfig
from pipedream.runtime.checkpoint.files import latest, load_all, writing
from pipedream.runtime.data.reader import in_order
from pipedream.runtime.engine.evaluation import EvaluationTotals
from pipedream.runtime.job import Job


def evaluate(
    model: nn.Module,
    path: Path,
    held_out: Dataset,
    config: RunConfig,
    loss: Loss,
    device: torch.device,
) -> dict[str, float]:
    """Loads the checkpoint at `path` into `model` and evaluates it in eval mode, on this worker.

    Returns `EvaluationTotals.result`. Raises UserError if the checkpoint is of another model.
    """
    load_plain(model, path)
    model.to(device).eval()
    totals = EvaluationTotals()
    with torch.no_grad():
        for batch in in_order(held_out, config, device):
            with blaming(config.model.source):
                output = model(*batch.inputs)
            mean, hit = loss(output, batch.target).item(), accuracy(output, batch.target)
            totals.add(mean, len(batch.inputs[0]), hit)
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


def export_newest(job: Job, target: Path) -> None:
    """Writes the run's newest checkpoint as `export` does, and says so on standard output."""
    path = latest(job.checkpoints)
    assert path is not None
    export(load_config_model(job.config, job.directory), path, target)
    print(f"Written: {target}")


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
    with writing(f"--export {target}"):
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(mode)  # it makes files for their owner alone
        partial.replace(target)
