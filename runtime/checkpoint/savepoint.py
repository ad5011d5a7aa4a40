"""The end of a leg: each rank saves its part of a checkpoint."""

from __future__ import annotations

from pipedream.comm.store_messages import from_first
from pipedream.runtime.engine.training_segment import Position
from pipedream.runtime.optim.optimizers import state_tensors
from pipedream.runtime.rank_context import Member


def save(member: Member, position: Position) -> None:
    """Begins to save what this rank has, and waits until rank 0 is here, however long its last save
    takes: in the next leg it would not be waited for longer than the timeout.
    """
    rank = member.rank
    _average_buffers(member)
    member.saver.begin(
        position,
        {**rank.parameters, **rank.buffers},
        lambda: state_tensors(rank.optimizer, rank.parameters),
        training=member.stepping.state(),
    )
    from_first(member.store, rank.place, f"at/{position}", True)


def _average_buffers(member: Member) -> None:
    """Batch-norm statistics and the like: the mean over the replicas goes on everywhere."""
    rank, group = member.rank, member.groups.stage
    if group is not None and rank.buffers:
        count = len(rank.job.plan.process_ranks[rank.stage])
        sums = {name: buffer.double() for name, buffer in rank.buffers.items()}
        member.transport.add_up(list(sums.values()), group)
        for name, buffer in rank.buffers.items():
            buffer.copy_(sums[name] / count)
