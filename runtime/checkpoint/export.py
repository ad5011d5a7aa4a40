"""The trained model as one file, for `from_pretrained`, or for torch.distributed.checkpoint."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from pipedream.capture.sources.load import load_config_model
from pipedream.graph.command import whole
from pipedream.graph.errors import UserError
from pipedream.runtime.checkpoint import files as checkpoint
from pipedream.runtime.checkpoint.dcp import optimizer_state, state_tensors, write_folder
from pipedream.runtime.optim.muon import roles_by_state, with_others
from pipedream.runtime.optim.optimizers import make_optimizer
from pipedream.runtime.optim.rates import LearningRate
from pipedream.runtime.run.job import Job


def export_newest(job: Job) -> None:
    """Writes the run's newest checkpoint as it is asked for, and says so on standard output."""
    path = checkpoint.latest(job.checkpoints)
    assert path is not None
    assert job.export is not None
    export(job, path, job.export)
    print(f"Written: {job.export}")


def export(job: Job, path: Path, target: Path) -> None:
    """Writes the checkpoint at `path` in the format that the name `target` says, all at once.

    What the pipeline does not hold (a parameter that no output depends on) is as the run's seed
    made it. A tied weight is there under each of its names. Raises UserError if the checkpoint is
    not of the run's model, or the disk refuses.
    """
    model = load_config_model(job.config, job.directory)
    checkpoint.load_plain(model, path)
    with checkpoint.writing(f"--export {target}"):
        if target.suffix == ".dcp":
            with _folder(target) as fresh:
                write_folder(fresh, model, _optimizer_state(job, path, model))
        elif target.suffix != ".safetensors" and hasattr(model, "save_pretrained"):
            with _folder(target) as fresh:
                _save_pretrained(model, fresh)
        else:
            _save_file(model, target)


def _save_file(model: nn.Module, target: Path) -> None:
    tensors = {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in state_tensors(model).items()
    }
    for name, tensor in tensors.items():
        if tensor.dtype == torch.complex128:
            raise UserError(
                f"--export {target}: safetensors has no complex128, which {name} is: write NAME.dcp"
            )
    with whole(target) as fresh:
        fresh.touch()
        mode = fresh.stat().st_mode
        save_file(tensors, fresh, metadata={"format": "pt"})
        fresh.chmod(mode)  # it makes files for their owner alone


@contextmanager
def _folder(target: Path) -> Iterator[Path]:
    """Yields a folder to fill, which then becomes `target`. What that had is of this run."""
    fresh = target.with_name(f"{target.name}.partial")
    shutil.rmtree(fresh, ignore_errors=True)  # from a run that was stopped while it wrote
    fresh.mkdir()
    yield fresh
    if target.is_dir():
        shutil.rmtree(target)
    fresh.replace(target)


def _save_pretrained(model: Any, folder: Path) -> None:
    """Writes it for `from_pretrained`; with the cache that was off while it was trained."""
    config: Any = getattr(model, "config", None)
    settings = [config, getattr(model, "generation_config", None)]
    if hasattr(config, "get_text_config"):
        settings.append(config.get_text_config())
    for each in settings:
        if hasattr(each, "use_cache"):
            each.use_cache = True
    with redirect_stderr(io.StringIO()):  # its bar
        model.save_pretrained(folder)


def _optimizer_state(job: Job, path: Path, model: nn.Module) -> dict[str, Any]:
    """Returns it at the learning rates of the checkpoint; which kernels made the steps is open."""
    parameters = dict(model.named_parameters())
    known = checkpoint.load_optimizer(path, parameters)
    config = with_others(job.optimizer, roles_by_state(parameters, known))
    optimizer = make_optimizer(config, parameters)
    progress = checkpoint.progress_of(path, checkpoint.read_state(path))
    rate = LearningRate(job.config.scheduler, optimizer, job.directory)
    rate.restore(progress.advances, progress.metrics)
    for group in optimizer.param_groups:
        if group.get("fused") and "fused" not in job.optimizer.args:
            group["fused"] = None
    return optimizer_state(model, optimizer, known)
