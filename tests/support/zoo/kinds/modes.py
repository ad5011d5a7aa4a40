"""Training and eval mode, what learns and what does not, precision and checkpoints inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.specimens import Inputs, specimen, vectors


class Layers(nn.Module):
    """Two linear layers, for what is done in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.between(self.a(x)))

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError


@specimen()
class PartInEval(Layers):
    """The norm and the dropout of a backbone stay in eval mode, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))

    def train(self, mode: bool = True) -> PartInEval:
        super().train(mode)
        self.backbone.eval()
        return self

    def between(self, h: Tensor) -> Tensor:
        return self.backbone(h)


@specimen()
class BySelfTraining(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h.tanh() if self.training else h.tanh() * 0.5


@specimen()
class OtherOutputInTraining(Layers):
    """An auxiliary head is there in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return (self.b(h), self.aside(h)) if self.training else (self.b(h), None)


@specimen()
def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    return model


@specimen()
def frozen_middle() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    model[2].requires_grad_(False)
    return model


@specimen()
def frozen_last() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    model[4].requires_grad_(False)
    return model


@specimen()
def frozen_weight_not_bias() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    for layer in (model[0], model[2], model[4]):
        layer.weight.requires_grad_(False)
    return model


def _wanting(examples: int) -> Inputs:
    (x,), _ = vectors(examples)
    return (x.requires_grad_(),), {}


@specimen(_wanting)
class InputWantsGradient(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h.tanh()


@specimen()
class NoGradRegion(Layers):
    """A teacher inside, that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            wanted = torch.tanh(self.teacher(x))
        return self.b(torch.tanh(self.a(x))) - wanted


@specimen()
class NoGradOfActivation(Layers):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            scale = h.abs().amax(1, keepdim=True)
            scale = scale + 1
        return h / scale


@specimen()
class EnableGradInside(Layers):
    """Gradients are switched off, and on again inside."""

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            scale = h.sigmoid()
            with torch.enable_grad():
                h = h.tanh()
        return h * scale


@specimen()
class NoGradDecorated(Layers):
    @torch.no_grad()
    def scale(self, h: Tensor) -> Tensor:
        return h.square().mean(1, keepdim=True).rsqrt()

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale(h)


@specimen()
class InferenceInside(Layers):
    def between(self, h: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = h.abs().amax(1, keepdim=True) + 1
        return h / scale.clone()


@specimen()
class Detached(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h + (h * 2).detach() * h.sigmoid()


@specimen()
class DetachedTrunk(Layers):
    """No gradient reaches the first layer."""

    def between(self, h: Tensor) -> Tensor:
        return h.detach().tanh()


@specimen()
class StraightThrough(Layers):
    def between(self, h: Tensor) -> Tensor:
        return h + (h.round() - h).detach()


@specimen()
class WhereTrick(Layers):
    """Where the other branch would be nan, its gradient is kept out."""

    def between(self, h: Tensor) -> Tensor:
        positive = h > 0
        return torch.where(positive, torch.where(positive, h, 1.0).sqrt(), h)


@specimen()
class Checkpointed(Layers):
    def between(self, h: Tensor) -> Tensor:
        def inner(h: Tensor) -> Tensor:
            return torch.tanh(self.a(h)) * h

        return checkpoint(inner, h, use_reentrant=False)


@specimen()
class CheckpointedReentrant(Layers):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(lambda h: torch.tanh(self.a(h)) * h, h, use_reentrant=True)


@specimen(single=True)
class AutocastInside(Layers):
    """A region in bfloat16."""

    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.a(h)
        return low.float().tanh()


@specimen(single=True)
class AutocastCrosses(Layers):
    """What lies between the stages is bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.d(self.c(self.b(self.a(x))))
        return h.float()


@specimen(single=True)
class AutocastOff(Layers):
    """A region that is kept in float32, whatever is around it."""

    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.a(h.float()).softmax(-1)


@specimen(single=True)
class PartInBfloat16(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(6, 6, dtype=torch.bfloat16)

    def between(self, h: Tensor) -> Tensor:
        return self.low(h.bfloat16()).float()


@specimen(single=True)
class UpToFloat64(Layers):
    """A norm that computes in double, as careful code does."""

    def between(self, h: Tensor) -> Tensor:
        wide = h.double()
        return (wide * wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(h.dtype)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() < 1)


@specimen()
class OwnFunction(Layers):
    def between(self, h: Tensor) -> Tensor:
        return Sign.apply(h)


class Scaled(torch.autograd.Function):
    """Two inputs, one of which has no gradient, and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, power: float) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.power = power
        return x * scale**power

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale = ctx.saved_tensors
        (gradient,) = gradients
        by_scale = (gradient * x * ctx.power * scale ** (ctx.power - 1)).sum()
        return gradient * scale**ctx.power, by_scale, None


@specimen()
class OwnFunctionOfParameter(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def between(self, h: Tensor) -> Tensor:
        return Scaled.apply(h, self.scale, 2.0)


class Reversed(torch.autograd.Function):
    """A gradient that is turned round, as for domains that should not differ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -0.5 * gradients[0]


@specimen()
class GradientReversed(Layers):
    def between(self, h: Tensor) -> Tensor:
        return Reversed.apply(h).tanh()


@specimen(refused="takes gradients in its forward pass")
class GradientInside(Layers):
    """The gradient of an energy by the input is what the model gives (a force)."""

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        energy = self.b(torch.tanh(self.a(x))).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force
