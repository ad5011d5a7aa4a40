"""Corrections for gradients that come late.

The gradient g that makes version t + 1 of a stage out of w(t) was found at an older version,
w(t - d); `Schedule.delays` says what d is. lr is the learning rate.

rate_correction (PipeMare: Yang, Zhang, Li, Re, Aberger, De Sa, "PipeMare: Asynchronous Pipeline
Parallel DNN Training", MLSys 2021, technique T1). While the weights change quickly a stage steps
the more carefully the later its gradients are:

    lr(k) = lr / D^p(k),   p(k) = 1 - min(k / K, 1)

at its update k = 0, 1, ... of the run, with D = max(1, the greatest delay of the stage) and K the
option's value. The paper's T2 corrects for forward and backward passes on different weights; with
weight stashing they are the same, so there is nothing for it to do.

weight_prediction (SpecTrain: Chen, Yang, Cheng, "Efficient and Robust Parallel DNN Training through
Model Parallelism on Multi-GPU Platform", 2018; PipeOptim: Guan et al., 2023): in
`pipedream.runtime.optim.prediction`.

error_feedback: in `pipedream.runtime.optim.error_feedback`.

basis_rotation: in `pipedream.runtime.optim.basis_rotation`. A stage whose gradients are d updates
late, of D at most in the whole pipeline, turns its bases every ceil(every (D + 1) / (d + 1))
updates: as often as it is asked for where they are latest, less often where there is less to make
good.

nesterov (Ajanthan, Ramasinghe, Zuo, Avraham, Long, "Nesterov Method for Asynchronous Pipeline
Parallel Optimization", ICML 2025). Nesterov's method with the momentum m, its gradient discounted
by 1 - m:

    look(t) = w(t) + m (w(t) - w(t-1))
    w(t+1)  = look(t) - lr (1 - m) grad f(look(t - d))

With m near 1 the look-ahead goes about as far as the delayed steps will, and a single late gradient
counts for little. The weights that are kept, trained on and saved are look(t), as is usual: with
u(t+1) = m u(t) + (1 - m) g that is, where lr is constant,

    look(t+1) = look(t) - lr (m u(t+1) + (1 - m) g)

and so it is done where lr changes, too: torch's SGD with nesterov at lr (1 - m). The form that the
paper trains with divides the same sum by Adam's root mean square: NAdam (Dozat 2016), as torch has
it, with b = m and mu(t) = b (1 - 0.96^(t psi) / 2), psi = 0.004, a momentum that grows to b:

    u(t) = b u(t-1) + (1 - b) g         v(t) = b2 v(t-1) + (1 - b2) g^2
    n(t) = mu(t+1) u(t) / (1 - mu(1) ... mu(t+1)) + (1 - mu(t)) g / (1 - mu(1) ... mu(t))
    w(t) = (1 - lr decay) w(t-1) - lr n(t) / (sqrt(v(t) / (1 - b2^t)) + eps)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pipedream.graph.choices import CORRECTED, DEFAULT_ORDER, ScheduleName, not_together
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import (
    AsynchronousConfig,
    BasisRotationConfig,
    OptimizerConfig,
    RunConfig,
)
from pipedream.runtime.optim.arguments import try_arguments

if TYPE_CHECKING:
    from torch.optim import Optimizer

_TORCH_RATE, _TORCH_DECAY = 1e-3, 0.01
"""The learning rate of torch's Adam and AdamW where none is given, and the decay of AdamW."""

_FORMS = {"SGD": "SGD", "Adam": "NAdam", "AdamW": "NAdam"}

ROTATED = "RotatedAdam"
"""Name of the class that is Adam and AdamW with basis_rotation."""


def check_corrections(config: AsynchronousConfig, schedule: ScheduleName, order: str) -> None:
    """Raises UserError for corrections of a schedule that they are not for, or of one another."""
    wanted = list(config.model_dump(exclude_defaults=True))
    if wanted and order != DEFAULT_ORDER:
        raise UserError(
            f"asynchronous: the corrections are for plans of order {DEFAULT_ORDER}, and this "
            f"one has order {order}: remove `asynchronous` from the run config"
        )
    for name in wanted:
        fit = CORRECTED.get(name, ("weight-stashing",))
        if schedule not in fit:
            raise UserError(
                f"asynchronous: {name} in the run config is for {', '.join(fit)}, and the schedule "
                f"is {schedule}: remove it, or train with --schedule {fit[0]}"
            )
    apart = not_together(wanted)
    if apart is not None:
        raise UserError(
            f"asynchronous: {apart[0]} and {apart[1]} are not to be had together: leave one of "
            "them out"
        )


def optimizer_form(config: OptimizerConfig, wanted: AsynchronousConfig) -> OptimizerConfig:
    """Returns the form of this optimizer that the corrections ask for, or itself. Raises UserError
    if there is none.
    """
    if ROTATED in (config.name, *(group.name for group in config.groups)):
        raise UserError(
            f"optimizer {ROTATED!r}: write Adam or AdamW and asynchronous: {{basis_rotation: true}}"
        )
    if wanted.nesterov is not None:
        return nesterov_form(config, wanted.nesterov)
    if wanted.basis_rotation is not None:
        return rotated_form(config, wanted.basis_rotation)
    return config


def nesterov_form(config: OptimizerConfig, momentum: float) -> OptimizerConfig:
    """Returns the Nesterov form of this optimizer. Raises UserError if there is none.

    The form of SGD steps at 1 - m times its rate: see `rate_factor`.
    """
    if config.name not in _FORMS:
        raise UserError(
            "asynchronous: nesterov: there is such a form of SGD, Adam and AdamW, and the "
            f"optimizer is {config.name}: choose one of them, or leave nesterov out"
        )
    args_of = partial(_form, config.name, momentum=momentum)
    return _in_form(config, "nesterov", _FORMS[config.name], args_of)


def _in_form(
    config: OptimizerConfig,
    option: str,
    name: str,
    args_of: Callable[[dict[str, Any]], dict[str, Any]],
) -> OptimizerConfig:
    """Returns the optimizer `name`, whose arguments are made from those that the config has, group
    by group. Raises UserError if a group has an optimizer of its own.
    """
    if any(group.name is not None for group in config.groups):
        raise UserError(
            f"asynchronous: {option}: it is a form of one optimizer: remove `name` from the "
            f"optimizer's groups, or leave {option} out"
        )
    groups = (
        group.model_copy(update={"args": args_of(config.args | group.args)})
        for group in config.groups
    )
    return OptimizerConfig(name=name, args=args_of(config.args), groups=tuple(groups))


def _form(name: str, args: dict[str, Any], momentum: float) -> dict[str, Any]:
    for refused in ("dampening", "amsgrad"):
        if args.get(refused):
            raise UserError(
                f"asynchronous: nesterov: it has no {refused}: remove that from the optimizer's "
                "args"
            )
    if name == "SGD":
        return args | {"momentum": momentum, "nesterov": True}
    try_arguments("optimizer", name, args)
    # Defaults are those of the optimizer that was named, not of NAdam.
    decoupled = name == "AdamW"
    kept = {name: value for name, value in args.items() if name not in ("amsgrad", "fused")}
    whole = {"lr": _TORCH_RATE, "weight_decay": _TORCH_DECAY if decoupled else 0.0} | kept
    _, squares = kept.get("betas", (0.9, 0.999))
    if momentum**2 >= squares:
        raise UserError(
            f"asynchronous: nesterov: {momentum:g} remembers gradients longer than the mean of "
            f"their squares, betas [.., {squares:g}], and steps may grow without bound: write a "
            f"momentum of less than {squares**0.5:.4g}"
            + ", or betas: [0.9, 0.999]"
            * (squares < 0.999)
        )
    return whole | {"betas": [momentum, squares], "decoupled_weight_decay": decoupled}


def rotated_form(config: OptimizerConfig, rotation: BasisRotationConfig) -> OptimizerConfig:
    """Returns Adam or AdamW with rotated bases. Raises UserError for other optimizers."""
    if config.name not in ("Adam", "AdamW"):
        raise UserError(
            "asynchronous: basis_rotation: it is a form of Adam and AdamW, and the optimizer is "
            f"{config.name}: choose one of them, or leave basis_rotation out"
        )
    args_of = partial(_rotated, config.name, rotation=rotation)
    return _in_form(config, "basis_rotation", ROTATED, args_of)


def _rotated(name: str, args: dict[str, Any], rotation: BasisRotationConfig) -> dict[str, Any]:
    for refused in ("amsgrad", "maximize", "capturable", "differentiable"):
        if args.get(refused):
            raise UserError(
                f"asynchronous: basis_rotation: it has no {refused}: remove that from the "
                "optimizer's args"
            )
    try_arguments("optimizer", name, args)
    left_out = ("amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused")
    kept = {name: value for name, value in args.items() if name not in left_out}
    is_decoupled = name == "AdamW" or bool(kept.pop("decoupled_weight_decay", False))
    whole = {"lr": _TORCH_RATE, "weight_decay": _TORCH_DECAY if name == "AdamW" else 0.0} | kept
    return whole | {"decoupled": is_decoupled, **rotation.model_dump()}


def turns_every(every: int, delay: int, greatest: int) -> int:
    """Returns after how many updates a stage with this delay turns its bases: `every` with the
    greatest delay of all stages.
    """
    return math.ceil(every * (greatest + 1) / (delay + 1))


def slowing(delay: int, update: int, updates: int) -> float:
    """Returns PipeMare's divisor of the learning rate at update `update` of the run: D^p."""
    exponent = 1 - min(update / updates, 1)
    return float(max(1, delay) ** exponent)


def rate_factor(config: RunConfig, delay: int, update: int) -> float:
    """Returns the factor of the learning rate at update `update` of a stage with this delay."""
    wanted, factor = config.asynchronous, 1.0
    if wanted.nesterov is not None and config.optimizer.name == "SGD":
        factor *= 1 - wanted.nesterov  # NAdam's step includes it
    if wanted.rate_correction is not None:
        factor /= slowing(delay, update, wanted.rate_correction)
    return factor


def scale_rate(optimizer: Optimizer, factor: Callable[[], float]) -> None:
    """Makes each step of `optimizer` use its learning rate times `factor()`.

    Between steps the rate is the one that was set, so that a scheduler finds what it left.
    """
    rates: list[Any] = []

    def scale(optimizer: Optimizer, *_: object) -> None:
        now = factor()
        rates[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * now

    def restore(optimizer: Optimizer, *_: object) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(scale)
    optimizer.register_step_post_hook(restore)
