"""`pd-train --evaluate-only`: a checkpoint on the held-out data, and nothing trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pipedream.capture.sources.load import load_config_model
from pipedream.graph.command import write_whole
from pipedream.runtime.checkpoint import files as checkpoint
from pipedream.runtime.checkpoint.plain_model import evaluate
from pipedream.runtime.epochs import evaluate_stages
from pipedream.runtime.rank_context import RankContext
from pipedream.runtime.report.metrics.writers import Writers
from pipedream.runtime.report.summary import show_metrics
from pipedream.runtime.run.job import EVALUATION
from pipedream.runtime.run.training_segment import Position


class EvaluationContext(RankContext):
    """A rank among the others, with the weights of the checkpoint; nobody gets its metrics."""

    def _begin(self) -> Position:
        path = checkpoint_of(self)
        for stage in self.local.stages:
            with torch.no_grad():
                checkpoint.load_model(path, stage.saved, stage.region, stage.whole_shape)
        return Position(0)

    def _writers(self) -> Writers:
        return Writers({})


def checkpoint_of(context: RankContext) -> Path:
    """The checkpoint that is asked for, by default the newest."""
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
        metrics = _on_this_worker(context, path)
    if local.rank_info.rank == 0:
        _report(context, path, metrics)


def _on_this_worker(context: RankContext, path: Path) -> dict[str, float]:
    local = context.local
    config, held_out = local.job.config, local.examples.held_out
    assert held_out is not None, "else the capture is refused"
    model = load_config_model(config, local.job.directory, names=local.examples.input_names)
    return evaluate(model, path, held_out, config, local.loss, local.device, local.metrics)


def _report(context: RankContext, path: Path, metrics: dict[str, float]) -> None:
    job, held_out = context.local.job, context.local.examples.held_out
    position, target = checkpoint.read_state(path).position, job.run / EVALUATION
    found: dict[str, Any] = {
        "checkpoint": str(path),
        "epochs": position.epoch,
        "minibatches": position.minibatch,
        "held_out_examples": 0 if held_out is None else len(held_out),
        **metrics,
    }
    write_whole(target, json.dumps(found, indent=1) + "\n")
    print("\n".join([f"checkpoint          {path}", *show_metrics(metrics)]))
    print(f"Written: {target}")
