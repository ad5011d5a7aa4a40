"""The end of a segment: each rank saves its part of a checkpoint."""

from __future__ import annotations

from pipedream.comm.store_messages import broadcast
from pipedream.runtime.engine.training_segment import Position
from pipedream.runtime.optim.optimizers import state_tensors
from pipedream.runtime.rank_context import RankContext


def save(context: RankContext, position: Position) -> None:
    """Begins to save what this rank has, and waits until rank 0 is here, however long its last save
    takes: in the next segment it would not be waited for longer than the timeout.
    """
    local = context.local
    _average_buffers(context)
    context.saver.begin(
        position,
        {**local.parameters, **local.buffers},
        lambda: state_tensors(local.optimizer, local.parameters),
        training=context.stepping.state(),
    )
    broadcast(context.store, local.place, f"at/{position}", True)


def _average_buffers(context: RankContext) -> None:
    """Batch-norm statistics and the like: the mean over the replicas goes on everywhere."""
    local, group = context.local, context.groups.stage
    if group is not None and local.buffers:
        count = len(local.job.plan.process_ranks[local.stage])
        sums = {name: buffer.double() for name, buffer in local.buffers.items()}
        context.transport.add_up(list(sums.values()), group)
        for name, buffer in local.buffers.items():
            buffer.copy_(sums[name] / count)
