"""The one place where a stage is divided among the devices of a mesh, before anything runs."""

from __future__ import annotations

from collections.abc import Collection

from pipedream.capture.captured import Captured
from pipedream.capture.programs.loss_end import Target
from pipedream.graph.plan import Plan
from pipedream.runtime.stages.planned_passes import PlannedPasses
from pipedream.runtime.stages.sharded_stage import ShardedStage
from pipedream.runtime.stages.stage_module import StageModule


def divide(
    plan: Plan,
    captured: Captured,
    form: StageModule,
    device: int,
    names: Collection[str],
    target: Target | None = None,
    same_passes: bool = True,
) -> ShardedStage:
    """Divides a stage of the plan for a `device` of its mesh, and leaves the device's parts of
    parameters and buffers in the module of the stage's first `form`.

    `names`: of the model's parameters and buffers; `target`: of the first minibatch, where the
    stage's passes end in the loss; `same_passes`: as in `PlannedPasses`. Raises UserError for what
    cannot run on a mesh, or not as the plan says.
    """
    program, module = form.program, form.piece.module
    program.planned = PlannedPasses.of(
        plan, form.interface.stage, device, frozenset(names), same_passes
    )
    program.on_mesh(dict(module.named_parameters()), form.example(captured), target)
    assert program.sharding is not None
    program.sharding.take_parts(module)
    return program.sharding
