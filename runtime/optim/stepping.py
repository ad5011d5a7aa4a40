"""From the mean gradients of a round to a step of the optimizer: unscaled, checked, clipped.

Where all stages update at the same minibatches (`Policy.uniform_updates`) they decide together: the
norm is that of the whole model's gradient, which the ranks find in an action of its own
(`PipelineSpec.joint_norm`), and an update is left out by all or by none. Where each stage learns by
itself the norm is that of the stage, because the others' gradients of these minibatches are not
there yet. Replicas have the same sums, so they decide alike without asking; the devices of a mesh,
and replicas that divide the updates, add up their parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.optim import Optimizer

from pipedream.graph.errors import UserError
from pipedream.graph.run_config import RunConfig
from pipedream.runtime.optim.rates import LearningRate, LossSum
from pipedream.runtime.optim.weights import Weights

GROWTH, BACKOFF, PATIENCE = 2.0, 0.5, 2_000
"""Constants of the automatic loss scale, as in torch.amp.GradScaler: it grows after so many updates
that went well, and falls after one that did not."""

FIRST_SCALE = 65_536.0


class Progress(BaseModel):
    """What a run remembers beside the optimizer's tensors.

    `advances` and `metrics` are the scheduler's steps; None stands for a metric that was not
    finite. `loss_sum`: of the epoch under way, for a scheduler that looks at losses.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    advances: int = Field(default=0, ge=0)
    metrics: list[float | None] = []
    loss_sum: float | None = 0.0
    scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    went_well: int = Field(default=0, ge=0)
    skipped: int = Field(default=0, ge=0)


class Scale:
    """The factor of the loss. It must be the same in every stage at the same minibatch.

    `fixed`: the one that the run config sets; None to find it, if it `adapts`.
    """

    def __init__(self, adapts: bool = False, fixed: float | None = None) -> None:
        self.adapts = adapts and fixed is None
        self.value = fixed or (FIRST_SCALE if self.adapts else 1.0)
        self.went_well = 0

    def note(self, finite: bool) -> None:
        """Records whether the gradients of an update under this scale were finite."""
        if not self.adapts:
            return
        self.went_well = self.went_well + 1 if finite else 0
        if not finite:
            self.value *= BACKOFF
        elif self.went_well % PATIENCE == 0:
            self.value *= GROWTH


def scale_of(config: RunConfig) -> Scale:
    return Scale(config.autocast == "float16", config.loss_scale)


@dataclass(frozen=True)
class Norm:
    """Of gradients that are clipped together: its `value`, one float64 on their device. `finite`:
    whether it is; True if nobody has looked, since a look at a GPU waits for all it has to do.
    """

    value: Tensor
    finite: bool = True


@dataclass(eq=False)
class StageStepping:
    """The steps of one stage's optimizer.

    `rate` moves its learning rate. `counted` names the parameters whose gradients this stage adds
    to the norm; `norm_sum` adds a number up, in place, over those that have parts of the stage's
    gradients: the devices of its mesh, replicas that divide the updates. `skipped`: how many
    updates were left out.
    """

    optimizer: Optimizer
    parameters: Mapping[str, nn.Parameter]
    config: RunConfig
    rate: LearningRate
    counted: Collection[str]
    norm_sum: Callable[[Tensor], None] = lambda _: None
    skipped: int = 0

    def add_squares(self, gradients: Mapping[str, Tensor], total: Tensor) -> None:
        """Adds the squares of the gradients that count to `total`, in place."""
        for name, gradient in gradients.items():
            if name in self.counted:
                total += torch.linalg.vector_norm(gradient).double().square()

    def step(self, gradients: Mapping[str, Tensor], norm: Norm | None, updates: int) -> None:
        """Makes one step with these gradients, which are those of the parameters.

        `norm`: of all gradients that are clipped together, if it is watched; one that is known not
        to be finite has the step left out. The learning rate scheduler counts it as `updates`.
        """
        if norm is None or norm.finite:
            if norm is not None and self.config.clip_norm is not None:
                _clip(gradients.values(), norm.value, self.config.clip_norm)
            self._step()
        else:
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.rate.advance("update", updates)

    def _step(self) -> None:
        try:
            self.optimizer.step()
        except Exception as error:  # such as of a state that is not this optimizer's
            chosen = self.config.optimizer
            reason = (str(error).strip() or "no message").splitlines()[0]
            raise UserError(
                f"optimizer {chosen.name} {chosen.args} cannot make a step: "
                f"{type(error).__name__}: {reason}; a run that goes on needs the arguments with "
                "which it began"
            ) from error


def _clip(gradients: Collection[Tensor], norm: Tensor, most: float) -> None:
    """Scales the gradients in place to a norm of `most`, if it is more, as
    torch.nn.utils.clip_grad_norm_ does: without a look at the norm. One that is not finite leaves
    gradients that are not, and then a loss.
    """
    within = torch.ones_like(norm)
    factor = within.where(norm <= most, torch.full_like(norm, most) / (norm + 1e-6))
    for dtype in {gradient.dtype for gradient in gradients}:
        same = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._foreach_mul_(same, factor.to(dtype)[0])


class Stepping:
    """The updates of all stages of a rank.

    `losses` are added up if a scheduler looks at them. `add_up` replaces a tensor by its sum over
    all ranks. Each round of a stage is `agree`, where the schedule has a norm of the whole model,
    and then `update`; without the first the stage decides by itself.
    """

    def __init__(
        self,
        stages: Mapping[int, StageStepping],
        config: RunConfig,
        losses: LossSum,
        add_up: Callable[[Tensor], None],
    ) -> None:
        self.stages, self.losses, self.add_up = stages, losses, add_up
        self.scale = scale_of(config)
        self.watches, self.leaves_out = config.watches_norm, config.leaves_out
        self.agreed: dict[int, Mapping[str, Tensor]] = {}
        self.norm: Norm | None = None

    @property
    def rate(self) -> LearningRate:
        """Returns the learning rate of the first stage; the others' have made the same steps."""
        return next(iter(self.stages.values())).rate

    @property
    def skipped(self) -> int:
        return max(stage.skipped for stage in self.stages.values())

    def agree(self, stage: int, weights: Weights, divisor: int) -> None:
        """Takes the gradients of a round, a sum of `divisor`, for the norm of the whole model's.

        Gradients added from now on are of the next round. With the last stage of this rank the
        norm is computed, which waits for all ranks; until then none of its stages may update.
        """
        assert stage not in self.agreed, stage
        self.agreed[stage] = self._mean_gradients(weights, divisor)
        if len(self.agreed) == len(self.stages):
            squares = self._squares(self.agreed)
            self.add_up(squares)
            self.norm = self._norm(squares)

    def update(self, stage: int, number: int, weights: Weights, divisor: int, updates: int) -> None:
        """Makes version `number` of the weights of `stage` from a sum of `divisor` gradients."""
        stepping, gradients, norm = self.stages[stage], self.agreed.pop(stage, None), self.norm
        if gradients is None:
            gradients = self._mean_gradients(weights, divisor)
            norm = self._norm_of_stage(stage, gradients) if self.watches else None
        weights.update(gradients, lambda: stepping.step(gradients, norm, updates), number)

    def _mean_gradients(self, weights: Weights, divisor: int) -> Mapping[str, Tensor]:
        """Returns those of a round, which ends, without the loss scale."""
        gradients = weights.take_gradients(divisor)
        if self.scale.value != 1.0 and gradients:
            torch._foreach_div_(list(gradients.values()), self.scale.value)
        return gradients

    def _squares(self, gradients: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
        """Returns the sum of the squares of these stages' gradients that count: one float64."""
        squares = torch.zeros_like(self.losses.noted)  # on the device of the rank
        for stage, each in gradients.items():
            self.stages[stage].add_squares(each, squares)
        return squares

    def _norm_of_stage(self, stage: int, gradients: Mapping[str, Tensor]) -> Norm:
        squares = self._squares({stage: gradients})
        self.stages[stage].norm_sum(squares)
        return self._norm(squares)

    def _norm(self, squares: Tensor) -> Norm:
        """Returns their root. Where an update may be left out, the host waits for it, and the loss
        scale takes note.
        """
        norm = squares.sqrt()
        if not self.leaves_out:
            return Norm(norm)
        finite = math.isfinite(norm.item())
        self.scale.note(finite)
        return Norm(norm, finite)

    def note(self, loss: Tensor) -> None:
        """Called with the loss of a minibatch, on the rank that has computed it."""
        if self.rate.metric == "loss":
            self.losses.note(loss)

    def end_segment(self) -> None:
        assert not self.agreed
        if self.rate.metric == "loss":
            self.losses.end_segment()

    def end_epoch(self, minibatches: int) -> None:
        """Called after the last segment of an epoch of so many minibatches."""
        if self.rate.metric == "loss":
            self.see(self.losses.end_epoch(minibatches))
        for stage in self.stages.values():
            stage.rate.advance("epoch")

    def see(self, metric: float) -> None:
        """Passes the value of its metric to the scheduler of each stage."""
        for stage in self.stages.values():
            stage.rate.see(metric)

    def state(self) -> dict[str, Any]:
        """Returns what `restore` needs beside the optimizer's tensors.

        The same on all ranks, but for `skipped` (only reported) where stages decide alone.
        """
        return Progress(
            advances=self.rate.advances,
            metrics=self.rate.metrics,
            loss_sum=self.losses.value if math.isfinite(self.losses.value) else None,
            scale=self.scale.value,
            went_well=self.scale.went_well,
            skipped=self.skipped,
        ).model_dump()

    def restore(self, known: Progress) -> None:
        """Goes on where `state` was taken."""
        self.losses.value = math.nan if known.loss_sum is None else known.loss_sum
        for stage in self.stages.values():
            stage.rate.restore(known.advances, known.metrics)
            stage.skipped = known.skipped
        if self.scale.adapts:
            self.scale.value = known.scale or self.scale.value
            self.scale.went_well = known.went_well
