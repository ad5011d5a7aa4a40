"""Where a run begins: at its newest checkpoint, or with weights from elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from pipedream.graph.errors import UserError
from pipedream.runtime.checkpoint import files as checkpoint
from pipedream.runtime.checkpoint.dcp import Folder
from pipedream.runtime.local.local_model import LocalModel
from pipedream.runtime.local.local_stage import LocalStage
from pipedream.runtime.optim.optimizers import remembered_names, restore_state
from pipedream.runtime.optim.stepping import Stepping
from pipedream.runtime.run.job import Job
from pipedream.runtime.run.training_segment import Position


def resume(local: LocalModel, stepping: Stepping) -> Position:
    """Loads this rank's part of the newest checkpoint. Returns its position.

    Raises UserError if there is none, it has nothing left to do, or is of another optimizer.
    """
    path = checkpoint.latest(local.job.checkpoints)
    if path is None:
        raise UserError(f"--resume: there is no checkpoint in {local.job.checkpoints}")
    saved = checkpoint.read_state(path)
    _check(local.job, path, saved)
    _check_position(local, path, saved)
    for stage in local.stages:
        stage.load(path)
        known = checkpoint.load_optimizer(path, stage.parameters, stage.region, stage.own_state)
        stage.check_learners(known, f"--resume: {path}")
        restore_state(stage.optimizer, stage.updated, known)
    stepping.restore(checkpoint.progress_of(path, saved))
    return saved.position


def begin(path: Path, stages: Sequence[LocalStage], with_optimizer: bool) -> str:
    """Gives these stages the weights in a folder of torch.distributed.checkpoint, and the state of
    the optimizer if it has that and it is wanted. Returns what it took, in words.

    Raises UserError if the folder is broken, or of another model or optimizer.
    """
    folder, restored = Folder(path), False
    for stage in stages:
        with torch.no_grad():
            _load_weights(folder, stage)
        if with_optimizer and (known := folder.load_optimizer(stage.parameters)):
            local = {
                key: _local_state(stage, key.rpartition("/")[0], tensor)
                for key, tensor in known.items()
            }
            known = {key: tensor for key, tensor in local.items() if tensor is not None}
            _check_state(path, stage, known)
            restore_state(stage.optimizer, stage.updated, known)
            restored = True
    return f"the weights{' and the state of the optimizer' * restored} in {path}"


def _load_weights(folder: Folder, stage: LocalStage) -> None:
    """Loads the parameters and buffers of a stage; of what is divided the rank keeps its part."""
    divided = {
        name: torch.empty(stage.whole_shape(name), dtype=tensor.dtype)
        for name, tensor in stage.saved.items()
        if tuple(tensor.shape) != stage.whole_shape(name)
    }
    folder.load_model({**stage.saved, **divided})
    for name, tensor in divided.items():
        stage.saved[name].copy_(_local_part(stage, name, tensor))


def _local_part(stage: LocalStage, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if stage.sharding is None else stage.sharding.local_part(name, tensor)


def _local_state(stage: LocalStage, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    return stage.own_state(name, _local_part(stage, name, tensor))


def _check_state(path: Path, stage: LocalStage, known: Collection[str]) -> None:
    """Raises UserError if this is not what the stage's optimizer remembers: it would ignore it."""
    remembered: dict[str, set[str]] = {}
    for name, _, state in (key.rpartition("/") for key in known):
        remembered.setdefault(name, set()).add(state)
    for name, states in remembered.items():
        wanted = remembered_names(stage.optimizer, stage.updated[name])
        if states != wanted:
            raise UserError(
                f"{path}: of {name} its optimizer remembers {', '.join(sorted(states))}, and"
                f" {stage.job.optimizer_names} of the run config"
                f" {', '.join(sorted(wanted)) or 'nothing'}: write the optimizer with its arguments"
                " there, or add --no-init-optimizer, to begin with the weights alone"
            )


def _check(job: Job, path: Path, saved: checkpoint.State) -> None:
    optimizer = job.optimizer_names
    if saved.epoch >= job.epochs and job.is_finished and not job.restarted:
        raise UserError(f"--resume: {path} has completed all {job.epochs} epochs; raise --epochs")
    if saved.details.get("optimizer", optimizer) != optimizer:
        raise UserError(
            f"--resume: {path} is of a run with optimizer {saved.details['optimizer']}, "
            f"and the config says {optimizer}"
        )


def _check_position(local: LocalModel, path: Path, saved: checkpoint.State) -> None:
    """Raises UserError if the checkpoint lies inside an epoch with other minibatches."""
    size, minibatches = local.job.config.batch_size, local.examples.minibatches
    before = saved.details.get("batch_size", size)
    if saved.minibatch and before != size:
        raise UserError(
            f"--resume: {path} is inside an epoch of minibatches of {before}, and the config says "
            f"batch_size: {size}: go on with {before} to the end of the epoch"
        )
    if saved.minibatch >= max(minibatches, 1):
        raise UserError(
            f"--resume: {path} has {saved.minibatch} minibatches of an epoch behind it, and the "
            f"data give {minibatches}: go on with the data with which it began"
        )
