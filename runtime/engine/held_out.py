"""The held-out data through the pipeline after an epoch: every rank does its part, rank 0 hears."""

from __future__ import annotations

import torch

from pipedream.comm.store_messages import broadcast, receive_message, send_message
from pipedream.graph.errors import UserError
from pipedream.runtime.data.reader import Reader
from pipedream.runtime.engine.evaluation import EvaluationStage, EvaluationTotals
from pipedream.runtime.rank_context import RankContext


def try_held_out(context: RankContext, trial: EvaluationStage, epoch: int) -> None:
    """Tries what there is after `epoch` epochs. Raises as `EvaluationStage.run` does."""
    local, place = context.local, context.local.place
    context.say(f"at the held-out data after epoch {epoch}")
    held_out, tensors = local.examples.to_try(), {**local.parameters, **local.buffers}
    with torch.no_grad(), Reader(held_out, trial.to_read()) as data:
        totals = trial.run(data, tensors, context.transport, local.loss)
    key = f"held-out/{epoch}"
    send_message(context.store, f"{key}/{place.rank}", totals.told)
    if context.display is not None:
        told = [receive_message(context.store, f"{key}/{r}") for r in range(place.world_size)]
        context.tried = EvaluationTotals.result(told)
        context.display.held_out(epoch, epoch * local.examples.minibatches, context.tried)
    _show_scheduler(context, key)


def _show_scheduler(context: RankContext, key: str) -> None:
    """What a scheduler looks at, if it is in here: rank 0 has found it, and all do the same step.

    A checkpoint of this moment was saved before: a run that goes on from there comes here again.
    """
    name = context.stepping.rate.metric
    if name is None or name == "loss":
        return
    metric = broadcast(context.store, context.local.place, f"{key}/{name}", context.tried.get(name))
    if metric is None:
        raise UserError(f"scheduler: metric: the held-out data give no {name}: write held_out_loss")
    context.stepping.rate.see(metric)
