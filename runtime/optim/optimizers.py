"""The optimizer that a run config names, and its state by parameter name."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipedream.graph.errors import UserError
from pipedream.graph.run_config import OptimizerConfig
from pipedream.runtime.optim.basis_rotation import RotatedAdam
from pipedream.runtime.optim.late_gradients import ROTATED

_UNFIT = {
    "LBFGS": (
        "asks for the loss several times in a step, and a pipeline has gone on by then: write SGD, "
        "AdamW"
    ),
    "SparseAdam": (
        "takes sparse gradients only, and a stage's are dense, those of Embedding(sparse=True) "
        "too: write Adam"
    ),
}

_NOT_ELEMENTWISE = ("Adafactor", "Muon", ROTATED)
"""What these do to an element of a parameter depends on the others."""

_FORMS = {ROTATED: RotatedAdam}
"""Classes that are not torch's: forms of an optimizer that a run config asks for otherwise."""

_HALVES = (torch.bfloat16, torch.float16)
"""On a CPU, fused kernels (torch 2.13) leave most elements of such parameters as they are."""


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters `members` of the whole model, with their optimizer, one without groups.

    `option`: where the run config defines it.
    """

    option: str
    optimizer: OptimizerConfig
    members: frozenset[str]


class Together(Optimizer):
    """Several optimizers as one, each with its own parameters.

    Parameter groups and state are those of its parts, for schedulers and checkpoints.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        common = set.intersection(*(set(part.defaults) for part in parts))
        super().__init__(
            [group for part in parts for group in part.param_groups],
            {name: parts[0].defaults[name] for name in common},
        )
        self.parts = parts
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()


def make_optimizer(
    config: OptimizerConfig,
    parameters: Mapping[str, nn.Parameter],
    names: Iterable[str] | None = None,
    is_divided: Callable[[str], bool] = lambda name: False,
    fused: bool = True,
) -> Optimizer:
    """Returns the torch.optim optimizer of these parameters: all, or a stage's share of `names`.

    Each group is an optimizer by itself, which checks its arguments; a group may be empty. Raises
    UserError for a wrong name or option, and for an optimizer that has to see the whole of a
    parameter which is divided among devices. `fused`: with a fused kernel if the class has one and
    its arguments do not choose.
    """
    parameter_groups = groups(config, parameters if names is None else names)
    parts = [
        _make(group, {name: p for name, p in parameters.items() if name in group.members}, fused)
        for group in parameter_groups
    ]
    for group in parameter_groups:
        _check_divided(group, [name for name in parameters if is_divided(name)])
    return parts[0] if len(parts) == 1 else Together(parts)


def _check_divided(group: ParameterGroup, divided: Iterable[str]) -> None:
    own = next((name for name in divided if name in group.members), None)
    if own is not None and group.optimizer.name in _NOT_ELEMENTWISE:
        option, name, instead = group.option, group.optimizer.name, "write AdamW for it"
        if name == ROTATED:
            option, name, instead = "asynchronous", "basis_rotation", "leave basis_rotation out"
        raise UserError(
            f"{option}: {name} has to see the whole of {own}, which the plan divides among "
            f"devices: {instead}, or place it R in the plan"
        )


def _make(group: ParameterGroup, parameters: Mapping[str, nn.Parameter], fused: bool) -> Optimizer:
    config = group.optimizer
    kind = _FORMS.get(config.name) or getattr(torch.optim, config.name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind is Optimizer:
        names = {name.lower(): name for name in dir(torch.optim) if name[0].isupper()}
        del names["optimizer"]
        close = get_close_matches(config.name.lower(), names, n=1)
        hint = f"did you mean {names[close[0]]}?" if close else "write SGD, AdamW"
        raise UserError(f"optimizer {config.name!r}: torch.optim has no such class; {hint}")
    if config.name in _UNFIT:
        raise UserError(f"optimizer {config.name} {_UNFIT[config.name]}")
    if config.name == "Muon":
        _check_matrices(parameters)
        _check_buffer(config, parameters)
    if config.args.get("fused"):
        _check_kernels(parameters)
    args = _fast(kind, config, parameters) if fused else config.args
    try:
        return kind([{"params": list(parameters.values())}], **args)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{group.option} {config.name} {config.args}: {problem}") from error


def _check_matrices(parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if parameter.dim() != 2:
            raise UserError(
                f"optimizer Muon learns matrices, and {name} has {parameter.dim()} dimensions: "
                f"assign these to another optimizer, groups: [{{match: [{name!r}], name: AdamW}}]"
            )


def _check_buffer(config: OptimizerConfig, parameters: Mapping[str, Tensor]) -> None:
    """torch 2.13 divides in place what it orthogonalizes: the momentum itself, if that is neither
    looked ahead of nor cast.
    """
    for name, parameter in parameters.items():
        if not config.args.get("nesterov", True) and parameter.dtype == torch.bfloat16:
            raise UserError(
                f"optimizer Muon: with nesterov: false torch's loses the momentum of {name}, which"
                " is in bfloat16: leave nesterov out, or write another dtype"
            )


def _check_kernels(parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if _kernel_is_wrong(parameter):
            raise UserError(
                f"fused: torch's kernels for the CPU are wrong for {parameter.dtype}, in which "
                f"{name} is: leave fused out"
            )


def _kernel_is_wrong(parameter: Tensor) -> bool:
    return parameter.is_cpu and parameter.dtype in _HALVES


def _fast(
    kind: type[Optimizer], config: OptimizerConfig, parameters: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Returns the arguments, with the fused kernel if the class has one and they do not choose."""
    open_to_it = config.args.keys().isdisjoint(("foreach", "fused", "capturable", "differentiable"))
    fit = all(p.is_floating_point() and not _kernel_is_wrong(p) for p in parameters.values())
    fused = open_to_it and fit and "fused" in inspect.signature(kind).parameters
    return {"fused": True} | config.args if fused else config.args


def state_tensors(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Returns the optimizer's state as `PARAMETER/STATE` -> tensor; numbers as 0-d tensors."""
    return {
        f"{name}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def restore_state(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Restores what `state_tensors` returned, on the devices that Optimizer.load_state_dict would
    choose: beside the parameter; the step count only if it is part of the kernel.
    """
    counts_beside = {
        parameter: bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for key, tensor in tensors.items():
        name, _, state = key.rpartition("/")
        parameter = parameters[name]
        remembered: dict[str, Any] = optimizer.state[parameter]
        stays = state == "step" and not counts_beside[parameter]
        remembered[state] = tensor if stays else tensor.to(parameter.device)


def remembered_names(optimizer: Optimizer, parameter: nn.Parameter) -> set[str]:
    """The names of what the optimizer remembers of this parameter, or will: it tries a step with
    one like it.
    """
    if parameter in optimizer.state:  # such as of Adagrad, before its first step
        return _names(optimizer.state[parameter])
    (part, group) = next(
        (part, group)
        for part in (optimizer.parts if isinstance(optimizer, Together) else [optimizer])
        for group in part.param_groups
        if any(each is parameter for each in group["params"])
    )
    like = nn.Parameter(torch.zeros_like(parameter))
    like.grad = torch.zeros_like(like)
    trial = object.__new__(type(part))
    trial.__setstate__(
        {
            "defaults": part.defaults,
            "state": defaultdict(dict),
            "param_groups": [{**group, "params": [like]}],
        }
    )
    trial.step()
    return _names(trial.state[like])


def _names(state: Mapping[str, Any]) -> set[str]:
    return {name for name, value in state.items() if value is not None}


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Returns whether a name matches one of the patterns, of which many may be plain names."""
    plain = {pattern for pattern in patterns if not set(pattern) & set("*?[")}
    others = [pattern for pattern in patterns if pattern not in plain]
    return lambda name: name in plain or any(fnmatchcase(name, each) for each in others)


def groups(config: OptimizerConfig, names: Iterable[str]) -> list[ParameterGroup]:
    """Returns the groups of the config, then one of the parameters that match none of them, if any.

    `names`: all parameters of the model. They are the same on every stage, in one order, though a
    stage has some members of each, or none: the second group is the same one everywhere. Raises
    UserError if a pattern matches nothing, or a group gets nothing.
    """
    known = list(names)
    left, parameter_groups = known, []
    every = frozenset(known)
    for number, group in enumerate(config.groups):
        option = f"optimizer.groups.{number}"
        for pattern in group.match:
            if pattern not in every and not any(fnmatchcase(name, pattern) for name in known):
                raise UserError(
                    f"{option}: {pattern!r} matches no parameter of the model, such as "
                    f"{', '.join(known[:3])}: a * stands for any letters"
                )
        matches = matcher(group.match)
        own = [name for name in left if matches(name)]
        if not own:
            raise UserError(
                f"{option}: the groups before it have all that it matches: move it before them"
            )
        optimizer = OptimizerConfig(name=config.name, args=config.args | group.args)
        if group.name is not None:
            optimizer = OptimizerConfig(name=group.name, args=group.args)
        parameter_groups.append(ParameterGroup(option, optimizer, frozenset(own)))
        left = [name for name in left if name not in parameter_groups[-1].members]
    if left or not parameter_groups:
        rest = OptimizerConfig(name=config.name, args=config.args)
        parameter_groups.append(ParameterGroup("optimizer", rest, frozenset(left)))
    return parameter_groups
