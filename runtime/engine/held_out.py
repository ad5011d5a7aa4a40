"""The held-out data through the pipeline after an epoch: every rank does its part, rank 0 hears."""

from __future__ import annotations

import torch

from pipedream.comm.store_messages import from_first, hear, tell
from pipedream.graph.errors import UserError
from pipedream.runtime.data.reader import Reader
from pipedream.runtime.engine.evaluation import Stage, Tally
from pipedream.runtime.rank_context import Member


def try_held_out(member: Member, trial: Stage, epoch: int) -> None:
    """Tries what there is after `epoch` epochs. Raises as `Stage.run` does."""
    rank, place = member.rank, member.rank.place
    member.say(f"at the held-out data after epoch {epoch}")
    held_out, tensors = rank.examples.to_try(), {**rank.parameters, **rank.buffers}
    with torch.no_grad(), Reader(held_out, trial.to_read()) as data:
        tally = trial.run(data, tensors, member.transport, rank.loss)
    key = f"held-out/{epoch}"
    tell(member.store, f"{key}/{place.rank}", tally.told)
    if member.display is not None:
        told = [hear(member.store, f"{key}/{r}") for r in range(place.world_size)]
        member.tried = Tally.result(told)
        member.display.held_out(epoch, epoch * rank.examples.minibatches, member.tried)
    _show_scheduler(member, key)


def _show_scheduler(member: Member, key: str) -> None:
    """What a scheduler looks at, if it is in here: rank 0 has found it, and all do the same step.

    A checkpoint of this moment was saved before: a run that goes on from there comes here again.
    """
    name = member.stepping.rate.metric
    if name is None or name == "loss":
        return
    metric = from_first(member.store, member.rank.place, f"{key}/{name}", member.tried.get(name))
    if metric is None:
        raise UserError(f"scheduler: metric: the held-out data give no {name}: write held_out_loss")
    member.stepping.rate.see(metric)
