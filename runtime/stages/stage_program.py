"""The programs of one form of a stage, traced when a minibatch first needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from pipedream.capture.compute_settings import lowered
from pipedream.capture.programs.joint import CannotDivide
from pipedream.capture.programs.program import Program, traced_program
from pipedream.capture.segment import Segment


class StageProgram:
    """`piece` as programs, under the settings of its module: `autocast` and torch.compile's
    `backend`. All inputs of the piece have the same shapes each time.
    """

    def __init__(
        self, piece: Segment, device: torch.device, autocast: str | None, backend: str | None
    ) -> None:
        self.piece, self.device, self.autocast, self.backend = piece, device, autocast, backend
        self.made: Program | None = None
        self.obstacle: str | None = None

    def of(self, tensors: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> Program | None:
        """For parameters and inputs such as these; None if the stage cannot be divided, of which
        `obstacle` says why.
        """
        if self.made is None and self.obstacle is None:
            wants = [tensor.requires_grad for tensor in inputs]
            precision = lowered(self.autocast, self.device)
            module, state = self.piece.module, self.state(tensors)
            try:
                self.made = traced_program(module, state, inputs, wants, precision, self._compiled)
            except CannotDivide as error:
                self.obstacle = str(error)
        return self.made

    def state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters and buffers: `tensors`, and of the module those not among them."""
        return {**dict(self.piece.module.named_buffers()), **tensors}

    def _compiled(self, part: fx.GraphModule) -> Callable[..., Any]:
        if self.backend is None:
            return part.forward
        run: Callable[..., Any] = torch.compile(part, backend=self.backend, dynamic=False)
        return run
