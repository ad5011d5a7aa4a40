"""From the mean gradients of a round to a step of the optimizer: unscaled, checked, clipped.

Where all stages update at the same minibatches (`Policy.same_everywhere`) they decide together: the
norm is that of the whole model's gradient, and an update is left out by all or by none. Where each
stage learns by itself the norm is that of the stage, for the others' gradients of these minibatches
are not there yet. Replicas have the same sums, so they decide alike without asking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.optim import Optimizer

from pipedream.graph.errors import UserError
from pipedream.graph.run_config import RunConfig
from pipedream.runtime.optim.rates import LearningRate
from pipedream.runtime.report.loss_sum import LossSum

GROWTH, BACKOFF, PATIENCE = 2.0, 0.5, 2_000
"""Of a scale that is found by itself, as in torch.amp.GradScaler: every so many updates that went
well it grows, after one that did not it falls."""

FIRST_SCALE = 65_536.0


class Progress(BaseModel):
    """Of a run, beside what the optimizer keeps.

    `advances` and `metrics` are the scheduler's steps; `loss_sum` the losses so far of the epoch
    under way, for one that looks at them. None is what is no number.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    advances: int = Field(default=0, ge=0)
    metrics: list[float | None] = []
    loss_sum: float | None = 0.0
    scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    went_well: int = Field(default=0, ge=0)
    skipped: int = Field(default=0, ge=0)


class Scale:
    """What the loss is multiplied by. It must be the same in every stage at the same minibatch."""

    def __init__(self, config: RunConfig) -> None:
        self.adapts = config.autocast == "float16" and config.loss_scale is None
        self.value = config.loss_scale or (FIRST_SCALE if self.adapts else 1.0)
        self.went_well = 0

    def note(self, finite: bool) -> None:
        """How the update went that this scale was used for."""
        if not self.adapts:
            return
        self.went_well = self.went_well + 1 if finite else 0
        if not finite:
            self.value *= BACKOFF
        elif self.went_well % PATIENCE == 0:
            self.value *= GROWTH


class Stepping:
    """The steps of one stage's optimizer.

    `rate` moves its learning rate; `losses` are added up if it looks at them. `add_up` replaces a
    tensor by its sum over all ranks, None where each stage decides by itself. `counted` names the
    parameters that this rank contributes to the norm, so that what replicas or tied stages share
    counts once. `skipped`: how many updates were left out.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        config: RunConfig,
        rate: LearningRate,
        losses: LossSum,
        add_up: Callable[[Tensor], None] | None,
        counted: Collection[str],
    ) -> None:
        self.optimizer, self.parameters, self.config = optimizer, parameters, config
        self.rate, self.losses = rate, losses
        self.add_up, self.counted = add_up, frozenset(counted)
        self.scale = Scale(config)
        self.watches = (
            config.clip_norm is not None or config.nan == "skip" or self.scale.value != 1.0
        )
        self.skipped = 0

    def step(self, updates: int = 1) -> None:
        """One step with the gradients that the parameters have; the scheduler's for so many."""
        scale, norm = self.scale.value, 0.0
        gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        if scale != 1.0 and gradients:
            torch._foreach_div_(list(gradients.values()), scale)
        if self.watches:
            norm = self._norm(gradients)
            self.scale.note(math.isfinite(norm))
        if math.isfinite(norm):
            self._clip(gradients, norm)
            self._step()
        else:
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.rate.advance("update", updates)

    def _step(self) -> None:
        try:
            self.optimizer.step()
        except Exception as error:  # such as of a state that is not this optimizer's
            given = self.config.optimizer
            reason = (str(error).strip() or "no message").splitlines()[0]
            raise UserError(
                f"optimizer {given.name} {given.args} cannot make a step: {type(error).__name__}: "
                f"{reason}; a run that goes on needs the arguments with which it began"
            ) from error

    def note(self, loss: Tensor) -> None:
        """The loss of a minibatch, on the rank that has found it."""
        if self.rate.metric == "loss":
            self.losses.note(loss)

    def end_segment(self) -> None:
        if self.rate.metric == "loss":
            self.losses.end_segment()

    def end_epoch(self, minibatches: int) -> None:
        """After the last segment of an epoch of so many minibatches."""
        if self.rate.metric == "loss":
            self.rate.see(self.losses.end_epoch(minibatches))
        self.rate.advance("epoch")

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on, beside the optimizer's tensors.

        The same on all ranks, but for the report's `skipped` where each stage decides by itself.
        """
        return Progress(
            advances=self.rate.advances,
            metrics=self.rate.metrics,
            loss_sum=self.losses.value if math.isfinite(self.losses.value) else None,
            scale=self.scale.value,
            went_well=self.scale.went_well,
            skipped=self.skipped,
        ).model_dump()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises pydantic's ValidationError where `state` is none that `state()` gives."""
        known = Progress.model_validate(state)
        self.rate.restore(known.advances, known.metrics)
        self.losses.value = math.nan if known.loss_sum is None else known.loss_sum
        self.skipped = known.skipped
        if self.scale.adapts:
            self.scale.value = known.scale or self.scale.value
            self.scale.went_well = known.went_well

    def _norm(self, gradients: Mapping[str, Tensor]) -> float:
        mine = [g for name, g in gradients.items() if name in self.counted]
        squares = torch.zeros_like(self.losses.noted)  # on the device of the rank
        for gradient in mine:
            squares += torch.linalg.vector_norm(gradient).double().square()
        if self.add_up is not None:
            self.add_up(squares)
        return float(squares.sqrt())

    def _clip(self, gradients: Mapping[str, Tensor], norm: float) -> None:
        most = self.config.clip_norm
        if most is not None and norm > most:
            # As torch.nn.utils.clip_grad_norm_ does it.
            torch._foreach_mul_(list(gradients.values()), most / (norm + 1e-6))
