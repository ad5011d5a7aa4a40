"""From the mean gradients of a round to a step of the optimizer: unscaled, checked, clipped.

Where all stages update at the same minibatches (`Policy.uniform_updates`) they decide together: the
norm is that of the whole model's gradient, and an update is left out by all or by none. Where each
stage learns by itself the norm is that of the stage, because the others' gradients of these
minibatches are not there yet. Replicas have the same sums, so they decide alike without asking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.optim import Optimizer

from pipedream.graph.errors import UserError
from pipedream.graph.run_config import RunConfig
from pipedream.runtime.engine.weights import Weights
from pipedream.runtime.optim.rates import LearningRate, LossSum
from pipedream.schedule.action import Action, Kind

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


class StageStepping:
    """The steps of one stage's optimizer.

    `rate` moves its learning rate. `counted` names the parameters whose gradients this stage adds
    to the norm. `skipped`: how many updates were left out.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        config: RunConfig,
        rate: LearningRate,
        counted: Collection[str],
    ) -> None:
        self.optimizer, self.parameters, self.config = optimizer, parameters, config
        self.rate, self.counted = rate, frozenset(counted)
        self.skipped = 0

    def add_squares(self, gradients: Mapping[str, Tensor], total: Tensor) -> None:
        """Adds the squares of the gradients that count to `total`, in place."""
        for name, gradient in gradients.items():
            if name in self.counted:
                total += torch.linalg.vector_norm(gradient).double().square()

    def step(self, gradients: Mapping[str, Tensor], norm: float, updates: int) -> None:
        """Makes one step with these gradients, which are those of the parameters.

        `norm`: of all gradients that are clipped together; if it is not finite the step is left
        out. The learning rate scheduler counts it as `updates`.
        """
        if math.isfinite(norm):
            self._clip(gradients, norm)
            self._step()
        else:
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.rate.advance("update", updates)

    def _clip(self, gradients: Mapping[str, Tensor], norm: float) -> None:
        most = self.config.clip_norm
        if most is not None and norm > most and gradients:
            # As torch.nn.utils.clip_grad_norm_ does it.
            torch._foreach_mul_(list(gradients.values()), most / (norm + 1e-6))

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


class _Update(NamedTuple):
    """An update of one stage that waits for those of the other stages of its rank.

    `make` makes it, given the norm of the gradients that are clipped together.
    """

    stepping: StageStepping
    gradients: Mapping[str, Tensor]
    make: Callable[[float], None]


class Stepping:
    """The updates of all stages of a rank.

    `losses` are added up if a scheduler looks at them. `add_up` replaces a tensor by its sum over
    all ranks; None if each stage decides by itself. With it, the ranks compute the norm of a round
    together when all stages of each rank have come to their update, which they make only then.
    """

    def __init__(
        self,
        stages: Mapping[int, StageStepping],
        config: RunConfig,
        losses: LossSum,
        add_up: Callable[[Tensor], None] | None,
    ) -> None:
        self.stages, self.losses, self.add_up = stages, losses, add_up
        self.scale = scale_of(config)
        self.watches = watches_norm(config)
        self.together = len(stages) if self.watches and add_up is not None else 1
        self.waiting: dict[int, list[_Update]] = {}

    @property
    def rate(self) -> LearningRate:
        """The learning rate of the first stage; those of the others have made the same steps."""
        return next(iter(self.stages.values())).rate

    @property
    def skipped(self) -> int:
        return max(stage.skipped for stage in self.stages.values())

    def update(self, stage: int, number: int, weights: Weights, divisor: int, updates: int) -> None:
        """Makes version `number` of the weights of `stage` from a sum of `divisor` gradients.

        May wait for other stages of this rank; gradients added meanwhile are of the next round.
        """
        stepping, gradients = self.stages[stage], weights.take_gradients(divisor)
        if self.scale.value != 1.0 and gradients:
            torch._foreach_div_(list(gradients.values()), self.scale.value)

        def make(norm: float) -> None:
            weights.update(gradients, lambda: stepping.step(gradients, norm, updates), number)

        waiting = self.waiting.setdefault(number, [])
        waiting.append(_Update(stepping, gradients, make))
        if len(waiting) == self.together:
            del self.waiting[number]
            norm = self._norm(waiting)
            for each in waiting:
                each.make(norm)

    def _norm(self, updates: Collection[_Update]) -> float:
        if not self.watches:
            return 0.0
        squares = torch.zeros_like(self.losses.noted)  # on the device of the rank
        for update in updates:
            update.stepping.add_squares(update.gradients, squares)
        if self.add_up is not None:
            self.add_up(squares)
        norm = float(squares.sqrt())
        self.scale.note(math.isfinite(norm))
        return norm

    def note(self, loss: Tensor) -> None:
        """Called with the loss of a minibatch, on the rank that has computed it."""
        if self.rate.metric == "loss":
            self.losses.note(loss)

    def end_segment(self) -> None:
        assert not self.waiting
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


def watches_norm(config: RunConfig) -> bool:
    """Returns whether updates need the norm of the gradients, to clip or to check them."""
    scales = scale_of(config).value != 1.0
    return config.clip_norm is not None or config.nan == "skip" or scales


def check_joint_updates(config: RunConfig, actions: Mapping[int, Sequence[Action]]) -> None:
    """Raises UserError if a rank uses a version of a stage before its other stages have come to the
    update that makes it: with one norm for all of them, the version does not exist by then.
    """
    for rank, listed in actions.items() if watches_norm(config) else ():
        stages = {action.stage for action in listed}
        newest = dict.fromkeys(stages, 0)
        for action in listed:
            if action.kind is Kind.UPDATE:
                newest[action.stage] = action.version
            elif action.version > min(newest.values()) and action.kind is Kind.FORWARD:
                raise UserError(
                    f"rank {rank} needs version {action.version} of stage {action.stage} at "
                    f"{action}, before all of its stages have made that update: "
                    "this order does not support clip_norm, nan: skip and loss_scale"
                )
