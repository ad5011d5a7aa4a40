"""The order of passes of a plan, as a CSV that torch.distributed.pipelining runs.

`_PipelineScheduleRuntime._load_csv` of torch 2.11 to 2.15 reads a row for each rank of a pipeline,
a cell for each pass: stage, letter, microbatch. It adds sends and receives itself. For ZB-H1 on two
stages and three microbatches:

    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2

`B` is a whole backward pass, `I` its first half, the gradients of the inputs, `W` its second, those
of the parameters. Each stage has each microbatch once: forward, then whole or in both halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan
from pipedream.schedule.action import Kind
from pipedream.schedule.orders.named import ROUND_ORDERS
from pipedream.schedule.schedule import ORDERS, Schedule
from pipedream.schedule.spec import PipelineSpec, in_order_of

LETTERS: Mapping[Kind, str] = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
}


@dataclass(frozen=True)
class TorchOrder:
    """`csv`: a row for each rank of one pipeline. `microbatches`: of a step, on each of them.
    `stage_ranks`: the rank of each stage, which is the number of its row.
    """

    csv: str
    microbatches: int
    stage_ranks: tuple[int, ...]


def torch_order(plan: Plan) -> TorchOrder:
    """Returns the order of a round; where all stages have r replicas, that of one pipeline of r.

    Raises UserError, with the reason alone, if torch cannot run it.
    """
    spec = _one_pipeline(plan)
    schedule = Schedule(spec, spec.microbatches)
    rows = []
    for own in spec.places:
        actions = schedule.actions(*((stage, 0) for stage in own))
        passes = [action for action in actions if action.kind in LETTERS]
        rows.append(",".join(f"{a.stage}{LETTERS[a.kind]}{a.minibatch}" for a in passes))
    return TorchOrder("\n".join(rows) + "\n", spec.microbatches, spec.place_of)


def _one_pipeline(plan: Plan) -> PipelineSpec:
    """Returns the pipeline of the first replica of each stage."""
    microbatches, replicas = plan.predicted.microbatches, plan.stages[0].replicas
    if plan.schedule not in ("flush", "gpipe"):
        raise UserError(f"torch updates all stages after a flush; this schedule is {plan.schedule}")
    if set(plan.replicas) != {replicas}:
        raise UserError("torch has as many replicas of every stage")
    if microbatches is None or microbatches % replicas:
        raise UserError("torch needs as many microbatches on each replica")
    _check_links(plan)
    stages, bounds = len(plan.stages), plan.max_in_flight
    each = microbatches // replicas
    spec = PipelineSpec(plan.schedule, (1,) * stages, plan.links, each, max_in_flight=bounds)
    spec = in_order_of(plan, spec)
    _check_order(spec)
    return spec


def _check_links(plan: Plan) -> None:
    """Raises UserError where a stage reads from any but the one before, or the first for inputs."""
    inputs = {node.id for node in plan.graph.nodes if node.is_input}
    for node in plan.graph.nodes:
        for source in node.inputs:
            first = 0 if source in inputs else plan.stage_of[source]
            if plan.stage_of[node.id] > first + 1:
                raise UserError(
                    f"its runtime sends to the next stage alone, and stage"
                    f" {plan.stage_of[node.id]} reads from stage {first}"
                )


def _check_order(spec: PipelineSpec) -> None:
    if spec.order not in ORDERS:
        raise UserError(f"order {spec.order} is not known: {', '.join(ORDERS)}")
    if spec.order in ROUND_ORDERS:
        misfit = ROUND_ORDERS[spec.order].misfit(spec)
        if misfit is not None:
            raise UserError(f"order {spec.order} {misfit}")
