"""Weight prediction: a minibatch runs on the weights as they should be when it makes its update.

With weight stashing d updates come between the forward pass of a minibatch on version w(t) and the
update it makes (`Schedule.delays`). Taking each of them for a repetition of the
last one, the minibatch runs, forward and backward, on

    w(t) + d (w(t) - w(t-1))

The last step, w(t) - w(t-1), is the learning rate times the optimizer's own direction: the momentum
for SGD, m / (sqrt(v) + eps) for Adam, with weight decay where there is some. For SGD with momentum
this is SpecTrain's prediction (Chen, Yang, Cheng, "Efficient and Robust Parallel DNN Training
through Model Parallelism on Multi-GPU Platform", 2018, with the difference of versions counted to
the update of the stage itself), for the others PipeOptim's (Guan, Li, Liang, Wang, Lu, "PipeOptim:
Ensuring Effective 1F1B Schedule with Optimizer-Dependent Weight Prediction", 2023). SGD without
momentum has its last gradient for a direction, which says little about the next ones.

The backward pass needs the weights of the forward pass, so predicted weights are stashed in place
of versions: one copy for each minibatch in flight, beside the newest version and the last step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipedream.comm.device.copies import copy_all

LAST_STEP = "last_step"
"""Its name in the optimizer's state, so that a checkpoint keeps it for each parameter."""


class Prediction:
    """Knows the last step of the parameters of one stage, from hooks on `optimizer`."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.optimizer, self.parameters = optimizer, dict(parameters)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def ahead(self, updates: int, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the parameters after that many more updates, as leaves of the autograd graph.

        Written into `memory`, tensors of the same shapes that nobody needs, or new memory.
        """
        return {
            name: self._ahead(parameter, updates, memory.get(name))
            for name, parameter in self.parameters.items()
        }

    def _ahead(self, parameter: nn.Parameter, updates: int, memory: Tensor | None) -> Tensor:
        result = torch.empty_like(parameter.data) if memory is None else memory.detach()
        step = self._step(parameter)
        if step is None:
            result.copy_(parameter.data)
        else:
            torch.add(parameter.data, step, alpha=updates, out=result)
        return result.requires_grad_(parameter.requires_grad)

    def _step(self, parameter: nn.Parameter) -> Tensor | None:
        step: Tensor | None = self.optimizer.state.get(parameter, {}).get(LAST_STEP)
        return step

    def _before(self, *_: object) -> None:
        """Remembers the parameters before a step, in the memory of their last step.

        Not in the optimizer's state: an entry would tell torch that its own state exists, too.
        """
        self.stood: dict[nn.Parameter, Tensor] = {}
        for parameter in self.parameters.values():
            last = self._step(parameter)
            if last is not None:
                self.stood[parameter] = last
            elif parameter.grad is not None:
                self.stood[parameter] = torch.empty_like(parameter.data)
        copy_all((stood, parameter.data) for parameter, stood in self.stood.items())

    def _after(self, *_: object) -> None:
        for parameter, stood in self.stood.items():
            torch.sub(parameter.data, stood, out=stood)
            self.optimizer.state[parameter][LAST_STEP] = stood
        self.stood = {}
