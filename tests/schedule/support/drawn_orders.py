"""Orders as diagrams: a row for each place, a column for each unit of time."""

from __future__ import annotations

from charts import timed

from pipedream.schedule.action import Kind
from pipedream.schedule.orders.literature import loop
from pipedream.schedule.orders.named import ROUND_ORDERS, round_of
from pipedream.schedule.spec import PassTimes, PipelineSpec

SHORT = {Kind.BACKWARD_INPUT: "b", Kind.BACKWARD_WEIGHT: "w"}


def flush_of(
    order: str,
    places: int,
    stages_each: int,
    microbatches: int,
    times: PassTimes | None = None,
    joint_norm: bool = False,
) -> PipelineSpec:
    """A chain of stages with a flush, on the ranks as the order wants it."""
    stages = places * stages_each
    rank_map = (ROUND_ORDERS[order].maps or (loop,))[0]
    return PipelineSpec(
        "flush",
        (1,) * stages,
        tuple((stage, stage + 1) for stage in range(stages - 1)),
        microbatches,
        order=order,
        rank_map=rank_map(places, stages_each),
        times=times,
        joint_norm=joint_norm,
    )


def drawn(spec: PipelineSpec) -> str:
    """Every pass as long as any other, whole backward passes twice as long; a letter for each
    stage of a place, F, b and w for the passes, B for b and w in one.
    """
    order = round_of(spec, spec.microbatches)
    lines = []
    for place, (own, times) in enumerate(zip(order, timed(spec, order), strict=True)):
        cells = ["."] * round(times[-1][1])
        for each, (begin, end) in zip(own, times, strict=True):
            cells[round(begin) : round(end)] = ["-"] * round(end - begin)
            stage = "acdefg"[spec.places[place].index(each.stage)]
            text = f"{SHORT.get(each.kind, each.kind)}{each.microbatch}"
            cells[round(begin)] = text if len(spec.places[place]) == 1 else stage + text
        width = max(map(len, cells)) + 1
        lines.append("".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)
