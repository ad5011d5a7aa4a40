"""The programs of one form of a stage, traced when a minibatch first needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from pipedream.capture.compute_settings import lowered
from pipedream.capture.programs.joint import CannotDivide, Joint, joint
from pipedream.capture.programs.program import Program
from pipedream.capture.segment import Segment
from pipedream.graph.errors import UserError
from pipedream.runtime.stages.stage_sharding import StageSharding


class StageProgram:
    """`piece` as programs, under the settings of its module: `autocast` and torch.compile's
    `backend`. All inputs of the piece have the same shapes each time. With `sharding` they are the
    programs of one device of a mesh; `constants` are its parts of those of the piece.
    """

    sharding: StageSharding | None = None

    def __init__(
        self, piece: Segment, device: torch.device, autocast: str | None, backend: str | None
    ) -> None:
        self.piece, self.device, self.autocast, self.backend = piece, device, autocast, backend
        self.made: Program | None = None
        self.obstacle: str | None = None
        self.constants: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> Program | None:
        """For parameters and inputs such as these; None if the stage cannot be divided, of which
        `obstacle` says why.
        """
        if self.made is None and self.obstacle is None:
            try:
                traced = self._traced(tensors, inputs)
                self.made = Program(traced, self._compiled)
            except CannotDivide as error:
                self.obstacle = str(error)
        return self.made

    def on_mesh(self, tensors: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> Program:
        """Those of a stage on a mesh, which has no other way to run. Raises UserError."""
        assert self.sharding is not None
        program = self.of(tensors, inputs)
        if program is None:
            raise UserError(
                f"stage {self.sharding.stage} cannot run on a mesh: {self.obstacle}; plan it "
                "without --mesh"
            )
        return program

    def state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters and buffers: `tensors`, and of the module those not among them."""
        return {**dict(self.piece.module.named_buffers()), **self.constants, **tensors}

    def _traced(self, tensors: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> Joint:
        state, sharding = self.state(tensors), self.sharding
        if sharding is not None:
            state = {name: sharding.whole_like(name, tensor) for name, tensor in state.items()}
        wants = [tensor.requires_grad for tensor in inputs]
        precision = lowered(self.autocast, self.device)
        traced = joint(self.piece.module, state, inputs, wants, precision)
        if sharding is None:
            return traced
        localized, assignment = sharding.localized(traced)
        if not sharding.placed:
            sharding.adopt(assignment)
        self.constants = sharding.constants(assignment, self.piece.module)
        return localized

    def _compiled(self, part: fx.GraphModule) -> Callable[..., Any]:
        if self.backend is None:
            return part.forward
        run: Callable[..., Any] = torch.compile(part, backend=self.backend, dynamic=False)
        return run
