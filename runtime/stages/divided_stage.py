"""A stage on a mesh in a loop of the user's own, whose optimizer steps whole parameters.

Each device has all parameters and buffers of the stage, alike, and takes its parts of them before
its passes. Afterwards the devices gather gradients, and buffers that were written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pipedream.capture.captured import Captured
from pipedream.graph.plan import Plan
from pipedream.runtime.stages.divide import divide
from pipedream.runtime.stages.sharded_stage import ShardedStage
from pipedream.runtime.stages.stage_module import StageModule


class DividedStage(NamedTuple):
    """`parameters` and `buffers` are those of the model; `module` has this device's parts."""

    sharding: ShardedStage
    module: nn.Module
    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, Tensor]

    @staticmethod
    def of(
        form: StageModule, captured: Captured, plan: Plan, device: int, names: Collection[str]
    ) -> DividedStage:
        """Divides the first form of a stage as `divide` does. Raises UserError."""
        module = form.piece.module
        parameters = dict(module.named_parameters())
        buffers = {name: buffer for name, buffer in module.named_buffers() if name in names}
        sharding = divide(plan, captured, form, device, names, same_passes=False)
        return DividedStage(sharding, module, parameters, buffers)

    @torch.no_grad()
    def take_parts(self) -> dict[str, Parameter]:
        """Returns this device's parts of the parameters as they are now; the module has them, and
        parts of the buffers.
        """
        own = dict(self.module.named_parameters())
        parts: dict[str, Tensor] = {**own, **self.buffer_parts()}
        for name, tensor in (*self.parameters.items(), *self.buffers.items()):
            if self.sharding.is_divided(name):
                parts[name].copy_(self.sharding.local_part(name, tensor))
        return own

    def buffer_parts(self) -> dict[str, Tensor]:
        """Returns the parts of the model's buffers that the module has."""
        return {n: buffer for n, buffer in self.module.named_buffers() if n in self.buffers}

    @torch.no_grad()
    def bring_back(self) -> None:
        """Gathers the buffers. Called by all devices of the mesh."""
        for name, part in self.buffer_parts().items():
            if self.sharding.is_divided(name):
                self.buffers[name].copy_(self.sharding.joined(name, part))

    def joined(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns whole gradients. Called by all devices of the mesh."""
        return {name: self.sharding.joined(name, each) for name, each in gradients.items()}
