"""Evaluation of the held-out data after an epoch, on every rank; rank 0 adds up and writes."""

from __future__ import annotations

from pipedream.comm.store_messages import broadcast, receive_message, send_message
from pipedream.graph.errors import UserError
from pipedream.runtime.engine.evaluation import Evaluation, EvaluationTotals
from pipedream.runtime.rank_context import RankContext


def try_held_out(context: RankContext, evaluation: Evaluation, epoch: int) -> None:
    """Evaluates the held-out data after `epoch` epochs. Raises as `Evaluation.run` does."""
    local, place = context.local, context.local.place
    context.say(f"at the held-out data after epoch {epoch}")
    tensors = {stage.stage: stage.saved for stage in local.stages}
    totals = evaluation.run(local.examples.to_try(), tensors, context.transport, local.loss)
    key = f"held-out/{epoch}"
    send_message(context.store, f"{key}/{place.rank}", totals.as_json)
    if context.display is not None:
        keys = (f"{key}/{rank}" for rank in range(place.world_size))
        of_ranks = [receive_message(context.store, each) for each in keys]
        context.metrics = EvaluationTotals.result(of_ranks)
        context.display.held_out(epoch, epoch * local.examples.minibatches, context.metrics)
    _show_scheduler(context, key)


def _show_scheduler(context: RankContext, key: str) -> None:
    """Passes the metric that a scheduler needs from rank 0 to all, which then take the same step.

    The checkpoint of this moment was saved before: a run resumed from it comes here again.
    """
    name = context.stepping.rate.metric
    if name is None or name == "loss":
        return
    place = context.local.place
    metric = broadcast(context.store, place, f"{key}/{name}", context.metrics.get(name))
    if metric is None:
        raise UserError(f"scheduler: metric: the held-out data give no {name}: write held_out_loss")
    context.stepping.see(metric)
