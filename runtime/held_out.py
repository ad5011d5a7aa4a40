"""The held-out data: evaluated between epochs, at the end of a run, or with nothing trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipedream.capture.errors.capture_errors import blaming_modules
from pipedream.capture.loss import Loss, Metric
from pipedream.capture.sources.load import load_config_model
from pipedream.capture.sources.minibatch import Dataset
from pipedream.comm.store_messages import broadcast, receive_message, send_message
from pipedream.graph.command import write_whole
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import RunConfig
from pipedream.runtime.checkpoint import files as checkpoint
from pipedream.runtime.data.reader import Reader, in_order
from pipedream.runtime.engine.evaluation import Evaluation, EvaluationExecutor, EvaluationTotals
from pipedream.runtime.rank_context import RankContext
from pipedream.runtime.report.metrics.writers import Writers
from pipedream.runtime.report.summary import show_metrics
from pipedream.runtime.run.job import EVALUATION
from pipedream.runtime.run.training_segment import Position


def evaluate_if_due(context: RankContext, done: int) -> None:
    """Evaluates the held-out data, if that is due after so many epochs. Raises as `Evaluation.run`
    does.
    """
    job, evaluation = context.local.job, context.local.evaluation
    if evaluation is None or done == 0:
        return
    if done % (job.config.evaluate_every or 1) != 0 and done != job.epochs:
        return
    context.say(f"at the held-out data after epoch {done}")
    key = f"held-out/{done}"
    metrics = evaluate_stages(context, evaluation, key)
    if context.display is not None:
        context.metrics = metrics
        context.display.held_out(done, done * context.local.examples.minibatches, metrics)
    _step_metric_scheduler(context, key)


def evaluate_stages(context: RankContext, evaluation: Evaluation, key: str) -> dict[str, float]:
    """Evaluates the held-out data with the stages' weights of now, through the pipeline. Returns
    the metrics on rank 0, to which the others send what they have under `key`.
    """
    local, rank_info = context.local, context.local.rank_info
    tensors = {stage.stage: stage.saved for stage in local.stages}
    kind = partial(EvaluationExecutor, metrics=local.metrics)
    with Reader(local.examples.to_try(), evaluation.minibatches_read) as data:
        totals, _ = evaluation.run(
            data, tensors, context.transport, local.loss, kind, context.progress
        )
    send_message(context.store, f"{key}/{rank_info.rank}", astuple(totals))
    if rank_info.rank:
        return {}
    keys = (f"{key}/{rank}" for rank in range(rank_info.world_size))
    return EvaluationTotals.result([receive_message(context.store, each) for each in keys])


def evaluate_alone(context: RankContext, path: Path) -> dict[str, float]:
    """Evaluates a checkpoint on the held-out data with the plain model, on this worker. Returns the
    metrics. Raises UserError.
    """
    local, config = context.local, context.local.job.config
    held_out = local.examples.held_out
    assert held_out is not None
    model = load_config_model(config, local.job.directory, names=local.examples.input_names)
    return evaluate(model, path, held_out, config, local.loss, local.device, local.metrics)


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
    checkpoint.load_plain(model, path)
    model.to(device).eval()
    totals = EvaluationTotals()
    with torch.no_grad():
        for batch in in_order(held_out, config, device):
            with blaming_modules(config.model.source, model):
                output = model(*batch.inputs)
            totals.add_outputs(output, batch.target, len(batch.inputs[0]), loss, metrics)
    return EvaluationTotals.result([astuple(totals.looked_at())])


def _step_metric_scheduler(context: RankContext, key: str) -> None:
    """Passes the metric that a scheduler needs from rank 0 to all, which then take the same step.

    The checkpoint of this moment was saved before: a run resumed from it comes here again.
    """
    name = context.stepping.rate.metric
    if name is None or name == "loss":
        return
    rank_info = context.local.rank_info
    metric = broadcast(context.store, rank_info, f"{key}/{name}", context.metrics.get(name))
    if metric is None:
        raise UserError(f"scheduler: metric: the held-out data give no {name}: write held_out_loss")
    context.stepping.see(metric)


class EvaluationContext(RankContext):
    """A rank that evaluates, with the weights of the checkpoint; nobody gets its metrics."""

    def _begin(self) -> Position:
        for stage in self.local.stages:
            stage.load(checkpoint_of(self))
        return Position(0)

    def _writers(self) -> Writers:
        return Writers({})


def checkpoint_of(context: RankContext) -> Path:
    """Returns the checkpoint that is asked for, by default the newest."""
    job = context.local.job
    path = job.checkpoint or checkpoint.latest(job.checkpoints)
    assert path is not None, "checked before"
    return path


def evaluate_only(context: RankContext) -> None:
    """Evaluates through the pipeline, or on rank 0 alone what cannot go through it. Rank 0 prints
    the metrics and writes evaluation.json. Raises UserError and PeerLost.
    """
    local, path = context.local, checkpoint_of(context)
    context.say("at the held-out data")
    if local.evaluation is not None:
        metrics = evaluate_stages(context, local.evaluation, "evaluation")
    elif local.rank_info.rank == 0:
        metrics = evaluate_alone(context, path)
    if local.rank_info.rank == 0:
        _report(context, path, metrics)


def _report(context: RankContext, path: Path, metrics: dict[str, float]) -> None:
    job, held_out = context.local.job, context.local.examples.held_out
    position, target = checkpoint.read_state(path).position, job.run / EVALUATION
    evaluation: dict[str, Any] = {
        "checkpoint": str(path),
        "epochs": position.epoch,
        "minibatches": position.minibatch,
        "held_out_examples": 0 if held_out is None else len(held_out),
        **metrics,
    }
    write_whole(target, json.dumps(evaluation, indent=1) + "\n")
    print("\n".join([f"checkpoint          {path}", *show_metrics(metrics)]))
    print(f"Written: {target}")
