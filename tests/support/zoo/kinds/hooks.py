"""Hooks on modules, and what models do to their own calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.specimens import between, specimen


def _three() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


@specimen()
def forward_hook_that_looks() -> nn.Module:
    model, seen = _three(), []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    return model


@specimen()
def forward_hook_that_changes() -> nn.Module:
    model = _three()
    model[2].register_forward_hook(lambda module, args, output: 2 * output + args[0])
    return model


@specimen()
def forward_hook_that_writes() -> nn.Module:
    """The hook changes what the layer gave in place."""
    model = _three()
    model[2].register_forward_hook(lambda module, args, output: output.mul_(2.0))
    return model


@specimen()
def pre_hook_that_changes() -> nn.Module:
    model = _three()
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    return model


@specimen()
def hook_on_the_whole() -> nn.Module:
    model = _three()
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, output: output.tanh())
    return model


@specimen(refused="hook on its gradients")
def backward_hook() -> nn.Module:
    model = _three()
    model[2].register_full_backward_hook(lambda module, inputs, outputs: None)
    return model


@specimen(refused="hook on its gradients")
def backward_pre_hook() -> nn.Module:
    model = _three()
    model[2].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))
    return model


@specimen(refused="hook on its gradients")
def gradient_hook_on_weight() -> nn.Module:
    model = _three()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    return model


@specimen(refused="hook on its gradients")
def hook_after_accumulation() -> nn.Module:
    model = _three()
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: None)
    return model


@specimen(refused="hook")
class GradientHookInside(nn.Module):
    """A hook on the gradient of an activation, set in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 2)
        return self.b(h)


@specimen()
class KeepsActivation(nn.Module):
    """An activation is kept as an attribute, for people to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.tanh(self.a(x)).detach()
        return self.b(torch.tanh(self.a(x)))


@specimen()
class PenaltyFromAttribute(nn.Module):
    """A layer leaves a penalty as an attribute, which the model adds to its output."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.penalty = nn.Linear(6, 6), torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.layer(x))
            self.penalty = h.square().mean()
            return h

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = self.Layer(), self.Layer(), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x))), self.a.penalty + self.b.penalty


@specimen(refused="calls|state|differ|determin")
class CountsInPython(nn.Module):
    """A number of Python counts the calls, and the result depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.a(x) * self.calls


@specimen(refused="state|differ|tensor|attribute|buffer")
class RemembersTensor(nn.Module):
    """The last minibatch is remembered in an attribute that is no buffer, and read in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.last = nn.Linear(6, 6), torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + self.last
        self.last = h.mean(0).detach()
        return h


@specimen()
def replaced_forward() -> nn.Module:
    """forward is a function set on the instance."""
    model = _three()
    inner = model[2]
    inner.forward = lambda x: 2 * nn.functional.linear(x, inner.weight)  # type: ignore[method-assign]
    return model


@specimen()
def wrapped_in_a_wrapper() -> nn.Module:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    return Wrapper(Wrapper(between(nn.GELU())))
