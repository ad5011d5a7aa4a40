"""The end of a segment: each rank saves its part of a checkpoint."""

from __future__ import annotations

from pipedream.comm.store_messages import broadcast
from pipedream.runtime.engine.training_segment import Position
from pipedream.runtime.local_stage import LocalStage
from pipedream.runtime.optim.optimizers import state_tensors
from pipedream.runtime.rank_context import RankContext


def save(context: RankContext, position: Position) -> None:
    """Begins to save this rank's part, and waits until rank 0 is here, however long its last save
    takes: in the next segment others would not wait for it longer than the timeout.
    """
    for stage in context.local.stages:
        _average_buffers(context, stage)
    written = [stage for stage in context.local.stages if stage.replica == 0]
    context.saver.begin(
        position,
        {
            stage.stage: (stage.saved, state_tensors(stage.optimizer, stage.parameters))
            for stage in written
        },
        training=context.stepping.state(),
    )
    broadcast(context.store, context.local.place, f"at/{position}", True)


def _average_buffers(context: RankContext, stage: LocalStage) -> None:
    """Replaces batch-norm statistics and the like by their mean over the replicas of the stage."""
    group = context.groups[stage.stage].replicas
    if group is not None and stage.buffers:
        count = len(context.assignment[stage.stage])
        sums = {name: buffer.double() for name, buffer in stage.buffers.items()}
        context.transport.add_up(list(sums.values()), group)
        for name, buffer in stage.buffers.items():
            buffer.copy_(sums[name] / count)
