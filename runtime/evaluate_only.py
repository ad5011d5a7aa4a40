"""`pd-train --evaluate-only`: a checkpoint on the held-out data, and nothing trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipedream.graph.command import write_whole
from pipedream.runtime.checkpoint import files as checkpoint
from pipedream.runtime.epochs import evaluate_alone, evaluate_stages
from pipedream.runtime.rank_context import RankContext
from pipedream.runtime.report.metrics.writers import Writers
from pipedream.runtime.report.summary import show_metrics
from pipedream.runtime.run.job import EVALUATION
from pipedream.runtime.run.training_segment import Position


class EvaluationContext(RankContext):
    """A rank among the others, with the weights of the checkpoint; nobody gets its metrics."""

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
