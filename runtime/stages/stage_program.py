"""One stage as programs, for backward passes in two halves: made when one first runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from pipedream.capture.compute_settings import Precision
from pipedream.capture.programs.attribution import GraphNodes
from pipedream.capture.programs.batch_norms import DividedBatchNorm
from pipedream.capture.programs.joint import CannotDivide, End, joint
from pipedream.capture.programs.localize import Redistribution
from pipedream.capture.programs.loss_end import LOSS, LossEnd, Target
from pipedream.capture.programs.program import Program
from pipedream.capture.segment import Segment
from pipedream.graph.errors import UserError
from pipedream.runtime.stages.crossings import Crossings
from pipedream.runtime.stages.recordings import Recordings
from pipedream.runtime.stages.stage_sharding import StageSharding


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
    torch.compile's `backend`. All inputs of the piece have the same shapes each time; its operators
    are of these `nodes` of the graph. With `sharding` they are the programs of one device of a
    mesh, and with `loss` they then end in it.
    """

    piece: Segment
    precision: Precision
    backend: str | None
    crossings: Crossings
    sharding: StageSharding | None = None
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
        assert self.sharding is not None
        if self.loss is not None and target is not None:
            if target.kind not in self.ending:
                self.ending[target.kind] = self._with_loss(self.loss, tensors, values, target)
            if (with_loss := self.ending[target.kind]) is not None:
                return with_loss
        program = self.of(tensors, values)
        if program is None:
            raise UserError(
                f"stage {self.sharding.stage} cannot run on a mesh: {self.obstacle}; plan it "
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
        state, sharding = self.state(tensors), self.sharding
        known = [values[name] for name in inputs]
        if sharding is not None:
            of_values = self.crossings.shapes
            state = {name: _of_shape(sharding.shape(name), t) for name, t in state.items()}
            known = [_of_shape(of_values.get(name), values[name]) for name in inputs]
        wants = [tensor.requires_grad for tensor in known]
        precision = self.precision.computing()
        trace = joint if sharding is None or self.nodes is None else self.nodes.joint
        traced = trace(self.piece.module, state, known, wants, precision, end)
        if end is not None:
            again = trace(self.piece.module, state, known, wants, precision, end)
            if again.module.code != traced.module.code:
                raise CannotDivide("the loss differs from pass to pass")
        if sharding is None:
            return NamedProgram(Program(traced, self._compiled), inputs, outputs)
        localized, assignment = sharding.localized(traced, inputs, outputs, self.crossings)
        if not sharding.placed:
            sharding.adopt(assignment)
        constants = sharding.constants(assignment, self.piece.module)
        return NamedProgram(Program(localized, self._compiled), inputs, outputs, constants)

    def _compiled(self, part: fx.GraphModule) -> Callable[..., Any]:
        if self.backend is None:
            return part.forward
        for node in part.graph.nodes:
            if isinstance(node.target, (Redistribution, DividedBatchNorm)):
                node.target = torch.compiler.disable(node.target)  # type: ignore[no-untyped-call]
        part.recompile()
        run: Callable[..., Any] = torch.compile(part, backend=self.backend, dynamic=False)
        return run


def _of_shape(shape: tuple[int, ...] | None, part: Tensor) -> Tensor:
    """Returns a tensor of the shape of all devices' parts, to trace with; `part` if it is that."""
    if shape is None or shape == tuple(part.shape):
        return part
    whole = torch.empty(shape, dtype=part.dtype, device=part.device)
    return whole.requires_grad_(part.requires_grad)
