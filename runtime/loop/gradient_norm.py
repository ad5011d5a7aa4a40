"""The norm of the gradients of a model whose parameters are on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from pipedream.capture.checks.equivalence import as_double
from pipedream.runtime.loop.staged_model import StagedModel
from pipedream.runtime.stages.partition import holds_first
from pipedream.schedule.action import Worker


def clip_gradients(
    staged: StagedModel,
    workers: Sequence[Worker],
    max_norm: float,
    total: Callable[[list[Tensor]], Tensor],
) -> Tensor:
    """Scales the gradients of this rank's `workers` as torch.nn.utils.clip_grad_norm_ does those of
    the whole model; returns what the norm was. `total` adds up values of all ranks.
    """
    gradients = [
        (parameter.grad, replica == 0 and holds_first(name, stage, staged.tied))
        for stage, replica in workers
        for name, parameter in staged.parameters(stage).items()
        if parameter.grad is not None
    ]
    norm = total([as_double(own).square().sum() for own, counts in gradients if counts]).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient, _ in gradients:
        gradient.mul_(factor)
    return norm
