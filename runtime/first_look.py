"""The first look at a run: who reports what, and what rank 0 does when it knows it all."""

from __future__ import annotations

from collections.abc import Sequence

from pipedream.graph.errors import UserError
from pipedream.graph.plan import workers_by_rank
from pipedream.runtime.rank_context import RankContext
from pipedream.runtime.report.first_minibatches import FEWEST, FirstLook, RankReport, span_of
from pipedream.runtime.run.training_segment import TrainingSegment
from pipedream.runtime.supervise.retune import Retuner


def first_look(
    context: RankContext, epoch: int, ahead: Sequence[TrainingSegment]
) -> RankReport | None:
    """Prepares it for a run that begins with the segments `ahead` of this epoch. Returns what this
    rank is to report; None if the first segment is too short.

    Raises UserError if it is, and the run is to plan again from it.
    """
    local, job = context.local, context.local.job
    sizes = local.examples.sizes
    left = len(sizes) * (job.epochs - epoch) - ahead[0].begin
    span = span_of(job, ahead[0], len(sizes) - bool(sizes.rest), left)
    if span is None:
        if job.retune is not None:
            raise UserError(
                f"--retune: {len(ahead[0])} minibatches up to the first checkpoint are too few to"
                f" measure, of which each rank needs {FEWEST} with a full pipeline: give a larger"
                " --save-every, or leave it out"
            )
        return None
    if context.display is not None:
        look = FirstLook(context.store, range(local.rank_info.world_size), span)
        context.display.reporting = lambda: _reported(context, look)
        if job.retune is not None:
            context.retuner = Retuner(job, context.display.note)
    workers = workers_by_rank(job.plan.rank_assignment)[local.rank_info.rank]
    return RankReport(context.store, local.rank_info.rank, workers, job.plan.replicas, span)


def _reported(context: RankContext, look: FirstLook) -> str | None:
    """Returns what there is to print, once; begins to plan again where that is asked for."""
    found, job = look.received(), context.local.job
    if found is None:
        return None
    if context.retuner is not None:
        context.retuner.begin(found.run(job))
    return "\n".join(found.lines(job))
