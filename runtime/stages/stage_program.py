"""One stage as programs, for backward passes in two halves: made when one first runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from pipedream.capture.compiled import compiled_function
from pipedream.capture.compute_settings import Precision
from pipedream.capture.programs.attribution import GraphNodes
from pipedream.capture.programs.batch_norms import DividedBatchNorm
from pipedream.capture.programs.divisible import divisible
from pipedream.capture.programs.joint import CannotDivide, End, Joint, joint
from pipedream.capture.programs.localize import Redistribution
from pipedream.capture.programs.loss_end import LOSS, LossEnd, Target
from pipedream.capture.programs.program import Program
from pipedream.capture.programs.recomputing import recompute
from pipedream.capture.segment import Segment
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import BY_GROUPS
from pipedream.runtime.stages.crossings import Crossings
from pipedream.runtime.stages.planned_passes import PlannedPasses
from pipedream.runtime.stages.recordings import Recordings
from pipedream.runtime.stages.sharded_stage import ShardedStage


@dataclass(frozen=True)
class NamedProgram:
    """A program, and the names of the values that it is given and gives. `constants`: a device's
    parts of those of its stage.
    """

    program: Program
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class StageProgram:
    """Runs `piece` as programs, under the settings of its module: its `precision` and
    torch.compile's `backend`, by which each is compiled in one piece. All inputs of the piece have
    the same shapes each time; its operators are of these `nodes` of the graph. With `planned` they
    are the programs of one device of a mesh, whose first passes say what its `sharding` is, and
    with `loss` they then end in it.
    """

    piece: Segment
    precision: Precision
    backend: str | None
    crossings: Crossings
    planned: PlannedPasses | None = None
    sharding: ShardedStage | None = None
    loss: LossEnd | None = None
    recordings: Recordings | None = None
    named: NamedProgram | None = None
    obstacle: str | None = None
    ending: dict[Hashable, NamedProgram | None] = field(default_factory=dict)
    nodes: GraphNodes | None = None

    def of(
        self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]
    ) -> NamedProgram | None:
        """For such parameters, and values that the stage receives or reads; None if it cannot be
        divided, of which `obstacle` says why.
        """
        if self.named is None and self.obstacle is None:
            try:
                self.named = self._traced(tensors, values, self.piece.inputs, self.piece.outputs)
            except CannotDivide as error:
                self.obstacle = str(error)
        return self.named

    def on_mesh(
        self,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        target: Target | None = None,
    ) -> NamedProgram:
        """As `of` for a stage on a mesh, which has no other way to run. With a `target` it ends in
        the loss, if that can be traced. Raises UserError.
        """
        assert self.planned is not None
        if self.loss is not None and target is not None:
            if target.kind not in self.ending:
                self.ending[target.kind] = self._with_loss(self.loss, tensors, values, target)
            if (with_loss := self.ending[target.kind]) is not None:
                return with_loss
        program = self.of(tensors, values)
        if program is None:
            raise UserError(
                f"stage {self.planned.stage} cannot run on a mesh: {self.obstacle}; plan it "
                "without --mesh"
            )
        return program

    def state(
        self, tensors: Mapping[str, Tensor], named: NamedProgram | None = None
    ) -> dict[str, Tensor]:
        """Returns the parameters and buffers, for a program: `tensors`, and of the module those not
        among them.
        """
        constants = {} if named is None else named.constants
        return {**dict(self.piece.module.named_buffers()), **constants, **tensors}

    def _with_loss(
        self,
        loss: LossEnd,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        target: Target,
    ) -> NamedProgram | None:
        """Returns None for a loss that looks at values, differs from call to call, or is wrong."""
        names = loss.inputs(self.piece, target)
        end = loss.end(self.piece, names, target)
        try:
            return self._traced(tensors, {**values, **target.tensors}, names, (LOSS,), end)
        except CannotDivide:
            return None

    def _traced(
        self,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        end: End | None = None,
    ) -> NamedProgram:
        """Raises CannotDivide."""
        traced = self._joint(tensors, values, inputs, end)
        if end is not None and self._joint(tensors, values, inputs, end).module.code != (
            traced.module.code
        ):
            raise CannotDivide("the loss differs from pass to pass")
        if self.planned is not None:
            return self._localized(self.planned, divisible(traced), inputs, outputs)
        return NamedProgram(Program(traced, self._compiled), inputs, outputs)

    def _joint(
        self,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        inputs: tuple[str, ...],
        end: End | None,
    ) -> Joint:
        """Of the whole stage. Raises CannotDivide."""
        state, known = self.state(tensors), [values[name] for name in inputs]
        if self.planned is not None:
            of_values = self.crossings.shapes
            known = [_of_shape(of_values.get(name), values[name]) for name in inputs]
        if self.sharding is not None:
            state = {name: _of_shape(self.sharding.shape(name), t) for name, t in state.items()}
        wants = [tensor.requires_grad for tensor in known]
        trace = joint if self.planned is None or self.nodes is None else self.nodes.joint
        return trace(self.piece.module, state, known, wants, self.precision.computing(), end)

    def _localized(
        self,
        planned: PlannedPasses,
        passes: Joint,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
    ) -> NamedProgram:
        """Of this device."""
        placed = None if self.sharding is None else self.sharding.placed
        assignment = planned.assignment(passes, inputs, outputs, self.crossings, placed)
        if self.sharding is None:
            self.sharding = ShardedStage.of(planned, assignment)
        local = self.sharding.localized(passes, assignment, inputs, outputs, self.crossings)
        if planned.recomputed_nodes:
            recompute(local, planned.recomputed_nodes)
        constants = self.sharding.constants(assignment, self.piece.module)
        return NamedProgram(Program(local, self._compiled), inputs, outputs, constants)

    def _compiled(self, part: fx.GraphModule) -> Callable[..., Any]:
        if self.backend is None:
            return part.forward
        for node in part.graph.nodes:
            if isinstance(node.target, (Redistribution, DividedBatchNorm)):
                node.target = torch.compiler.disable(node.target)  # type: ignore[no-untyped-call]
        part.recompile()
        return compiled_function(part, self.backend.removeprefix(BY_GROUPS), self.precision.device)


def _of_shape(shape: tuple[int, ...] | None, part: Tensor) -> Tensor:
    """Returns a tensor of the shape of all devices' parts, to trace with; `part` if it is that."""
    if shape is None or shape == tuple(part.shape):
        return part
    whole = torch.empty(shape, dtype=part.dtype, device=part.device)
    return whole.requires_grad_(part.requires_grad)
