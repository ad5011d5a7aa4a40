"""The learning rate scheduler of a run config: it steps by updates, by epochs, or by a metric.

Replicas and stages take the same steps with the same numbers.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from pipedream.capture.errors.user_code import blaming, load_function
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import SchedulerConfig

_FUNCTIONS = ("lr_lambda", "scale_fn")
"""The arguments of torch's schedulers that are functions, or lists of some."""


class LearningRate:
    """The steps of one scheduler, if there is one.

    `metric`: what it depends on, if on anything. `advances` counts its steps; of a scheduler with a
    metric, `metrics` lists the values that it received, None for one that is not finite.
    """

    def __init__(
        self, config: SchedulerConfig | None, optimizer: Optimizer, directory: Path
    ) -> None:
        self.config = config
        self.scheduler = None if config is None else make_scheduler(config, optimizer, directory)
        looks = self.scheduler is not None and _looks_at_a_metric(type(self.scheduler))
        self.metric = (config.metric or "loss") if looks and config is not None else None
        self.advances = 0
        self.metrics: list[float | None] = []

    def advance(self, what: str, times: int = 1) -> None:
        """Counts updates or epochs that are over, as `what` says."""
        if self.config is not None and self.config.every == what and self.metric is None:
            self.advances += times
            for _ in range(times):
                self._step()

    def see(self, metric: float) -> None:
        """Makes a step with what the metric is now."""
        known = metric if math.isfinite(metric) else None
        self.metrics.append(known)
        self._step(math.nan if known is None else known)

    def restore(self, advances: int, metrics: Sequence[float | None]) -> None:
        """Does all steps again: some schedulers have a state that is not JSON."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no step of the optimizer came before
            if self.metric is not None:
                for metric in metrics:
                    self.see(math.nan if metric is None else metric)
            elif self.config is not None:
                self.advance(self.config.every, advances)

    def _step(self, *metric: float) -> None:
        assert self.scheduler is not None
        assert self.config is not None
        with _explaining(self.config):
            self.scheduler.step(*metric)  # type: ignore[arg-type]


class LossSum:
    """`value` is the sum of the epoch so far, the same on all ranks whenever a segment has ended.

    `add_up` replaces a tensor by its sum over all ranks.
    """

    def __init__(self, add_up: Callable[[Tensor], None], device: torch.device) -> None:
        self.add_up = add_up
        self.noted = torch.zeros(1, dtype=torch.float64, device=device)
        self.value = 0.0

    def note(self, loss: Tensor) -> None:
        """Adds a loss that only this rank knows. Waits for no GPU."""
        self.noted += loss

    def end_segment(self) -> None:
        self.add_up(self.noted)
        self.value += self.noted.item()
        self.noted.zero_()

    def end_epoch(self, minibatches: int) -> float:
        """Returns the mean over all of the epoch; the next one begins."""
        mean, self.value = self.value / minibatches, 0.0
        return mean


def make_scheduler(config: SchedulerConfig, optimizer: Optimizer, directory: Path) -> LRScheduler:
    """Returns the scheduler of the run config; functions are looked for in `directory` first.

    Raises UserError for a wrong name or option.
    """
    kind = getattr(lr_scheduler, config.name, None)
    if not _is_scheduler(kind):
        raise UserError(
            f"scheduler {config.name!r}: torch.optim.lr_scheduler has no such class; write "
            "CosineAnnealingLR, OneCycleLR"
        )
    _check_metric(config, kind)
    args = {
        name: _functions(config, name, value, directory) if name in _FUNCTIONS else value
        for name, value in config.args.items()
    }
    if "schedulers" in args:
        parts = _parts(config)
        args["schedulers"] = [make_scheduler(part, optimizer, directory) for part in parts]
    with _explaining(config):
        return kind(optimizer=optimizer, **args)


def _is_scheduler(kind: Any) -> TypeGuard[type[LRScheduler]]:
    """Not what torch's own are made from, which has no rate to give."""
    return (
        isinstance(kind, type)
        and issubclass(kind, LRScheduler)
        and (kind.step, kind.get_lr) != (LRScheduler.step, LRScheduler.get_lr)
    )


def _looks_at_a_metric(kind: type[LRScheduler]) -> bool:
    return "metrics" in inspect.signature(kind.step).parameters


def _check_metric(config: SchedulerConfig, kind: type[LRScheduler]) -> None:
    looks = _looks_at_a_metric(kind)
    if config.metric is not None and not looks:
        raise UserError(f"scheduler {config.name} uses no metric: remove `metric`")
    if config.every == "update" and looks:
        raise UserError(
            f"scheduler {config.name} uses a metric, which is not available per update: "
            "remove `every`"
        )


def _functions(config: SchedulerConfig, name: str, value: Any, directory: Path) -> Any:
    """Returns what `package.module:function` names, or each of a list of them."""
    if isinstance(value, list):
        return [_functions(config, name, each, directory) for each in value]
    if not isinstance(value, str) or re.fullmatch(r"[\w.]+:[\w.]+", value) is None:
        raise UserError(
            f"scheduler {config.name}: {name}: write package.module:function, not {value!r}"
        )
    source = f"scheduler {config.name}: {name} {value}"
    function = load_function(value, directory)

    def checked(step: float) -> float:
        with blaming(source):
            factor = function(step)
        if not isinstance(factor, Real):
            raise UserError(f"{source} gives a {type(factor).__name__} for {step}, not a number")
        return float(factor)

    return checked


def _parts(config: SchedulerConfig) -> list[SchedulerConfig]:
    """Of SequentialLR and ChainedScheduler: a name and arguments each, in the config. UserError."""
    try:
        schedulers = TypeAdapter(list[SchedulerConfig]).validate_python(config.args["schedulers"])
    except ValidationError as error:
        raise UserError(
            f"scheduler {config.name}: schedulers: write a list, each with its name and args"
        ) from error
    if any("every" in part.model_fields_set for part in schedulers):
        raise UserError(
            f"scheduler {config.name}: schedulers: all step as it does: remove `every` from them, "
            "and write it beside its own name"
        )
    return schedulers


@contextmanager
def _explaining(config: SchedulerConfig) -> Iterator[None]:
    """Whatever torch's scheduler raises in here becomes a UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"scheduler {config.name} {config.args}: {problem}") from error
