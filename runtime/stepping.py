"""From the mean gradients of a round to a step of the optimizer: unscaled, checked, clipped.

Where all stages update at the same minibatches (`Policy.same_everywhere`) they decide together: the
norm is that of the whole model's gradient, and an update is left out by all or by none. Where each
stage learns by itself the norm is that of the stage, for the others' gradients of these minibatches
are not there yet. Replicas have the same sums, so they decide alike without asking.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from pipedream.graph.command import UserError
from pipedream.graph.config import RunConfig, SchedulerConfig

GROWTH, BACKOFF, PATIENCE = 2.0, 0.5, 2_000
"""Of a scale that is found by itself, as in torch.amp.GradScaler: every so many updates that went
well it grows, after one that did not it falls."""

FIRST_SCALE = 65_536.0


class Progress(BaseModel):
    """Of a run, beside what the optimizer keeps: `advances` are the scheduler's steps."""

    model_config = ConfigDict(frozen=True, strict=True)

    advances: int = Field(default=0, ge=0)
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

    `add_up` replaces a tensor by its sum over all ranks, None where each stage decides by itself.
    `counted` names the parameters that this rank contributes to the norm, so that what replicas or
    tied stages share counts once. `skipped`: how many updates were left out.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        config: RunConfig,
        add_up: Callable[[Tensor], None] | None,
        counted: Collection[str],
    ) -> None:
        self.optimizer, self.parameters, self.config = optimizer, parameters, config
        self.add_up, self.counted = add_up, frozenset(counted)
        self.scale = Scale(config)
        self.scheduler = make_scheduler(config.scheduler, optimizer)
        self.watches = (
            config.clip_norm is not None or config.nan == "skip" or self.scale.value != 1.0
        )
        self.skipped = 0
        self.advances = 0

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
        self._advance("update", updates)

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

    def end_epoch(self) -> None:
        self._advance("epoch", 1)

    def _advance(self, what: str, times: int) -> None:
        """Moves the learning rate on, if it goes by updates, or by epochs, as `what` says."""
        config = self.config.scheduler
        if self.scheduler is not None and config is not None and config.every == what:
            self.advances += times
            try:
                for _ in range(times):
                    self.scheduler.step()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                raise UserError(f"scheduler {config.name} {config.args}: {problem}") from error

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on, beside the optimizer's tensors.

        The same on all ranks, but for the report's `skipped` where each stage decides by itself.
        """
        return Progress(
            advances=self.advances,
            scale=self.scale.value,
            went_well=self.scale.went_well,
            skipped=self.skipped,
        ).model_dump()

    def restore(self, state: Mapping[str, Any]) -> None:
        """The scheduler does all its steps again: some have a state that is no JSON.

        Raises pydantic's ValidationError where `state` is none that `state()` gives.
        """
        known = Progress.model_validate(state)
        config = self.config.scheduler
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no step of the optimizer came before
            if config is not None:
                self._advance(config.every, known.advances)
        self.skipped = known.skipped
        if self.scale.adapts:
            self.scale.value = known.scale or self.scale.value
            self.scale.went_well = known.went_well

    def _norm(self, gradients: Mapping[str, Tensor]) -> float:
        mine = [g for name, g in gradients.items() if name in self.counted]
        device = next(iter(self.parameters.values())).device if self.parameters else "cpu"
        squares = torch.zeros(1, dtype=torch.float64, device=device)
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


def make_scheduler(
    config: SchedulerConfig | None, optimizer: Optimizer
) -> lr_scheduler.LRScheduler | None:
    """The scheduler that the run config names. Raises UserError for a wrong name or option."""
    if config is None:
        return None
    kind = getattr(lr_scheduler, config.name, None)
    if not (isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)):
        raise UserError(
            f"scheduler {config.name!r}: torch.optim.lr_scheduler has no such class; write "
            "CosineAnnealingLR, OneCycleLR"
        )
    if "metrics" in inspect.signature(kind.step).parameters:
        raise UserError(f"scheduler {config.name} asks for a metric: write CosineAnnealingLR")
    args = dict(config.args)
    if "schedulers" in args:
        args["schedulers"] = [make_scheduler(part, optimizer) for part in _parts(config)]
    try:
        return kind(optimizer, **args)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"scheduler {config.name} {config.args}: {problem}") from error


def _parts(config: SchedulerConfig) -> list[SchedulerConfig]:
    """Of SequentialLR and ChainedScheduler: a name and arguments each, in the config. UserError."""
    try:
        found = TypeAdapter(list[SchedulerConfig]).validate_python(config.args["schedulers"])
    except ValidationError as error:
        raise UserError(
            f"scheduler {config.name}: schedulers: write a list, each with its name and args"
        ) from error
    return found
