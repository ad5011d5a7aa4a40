"""The held-out data through the pipeline after an epoch: every rank does its part, rank 0 hears."""

from __future__ import annotations

import torch

from pipedream.runtime.data import Reader
from pipedream.runtime.evaluation import Stage, Tally
from pipedream.runtime.exchange import hear, tell
from pipedream.runtime.member import Member


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
