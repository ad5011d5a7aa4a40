"""The end of a leg: each rank saves its part of a checkpoint, and the run may stop there."""

from __future__ import annotations

from pipedream.runtime.exchange import from_first
from pipedream.runtime.legs import Position
from pipedream.runtime.member import Member
from pipedream.runtime.optimizers import state_tensors


def save(member: Member, position: Position) -> bool:
    """Begins to save what this rank has, wherever the others are. Whether the run stops here."""
    rank = member.rank
    _average_buffers(member)
    member.saver.begin(
        position,
        {**rank.parameters, **rank.buffers},
        lambda: state_tensors(rank.optimizer, rank.parameters),
        training=member.stepping.state(),
    )
    return _asked_to_stop(member, position) and position < Position(rank.job.epochs)


def _asked_to_stop(member: Member, position: Position) -> bool:
    """What rank 0 knows when it comes here. The others wait for it, however long its last save
    takes: the next leg would not wait longer than the timeout.
    """
    asked = member.pulse is not None and member.pulse.asked_to_stop
    return bool(from_first(member.store, member.rank.place, f"stop/{position}", asked))


def _average_buffers(member: Member) -> None:
    """Batch-norm statistics and the like: the mean over the replicas goes on everywhere."""
    rank, group = member.rank, member.groups.stage
    if group is not None and rank.buffers:
        count = len(rank.job.plan.process_ranks[rank.stage])
        sums = {name: buffer.double() for name, buffer in rank.buffers.items()}
        member.transport.add_up(list(sums.values()), group)
        for name, buffer in rank.buffers.items():
            buffer.copy_(sums[name] / count)
