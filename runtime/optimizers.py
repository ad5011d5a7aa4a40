"""The optimizer that a run config names, and its state by parameter name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipedream.graph.command import UserError
from pipedream.graph.config import OptimizerConfig

_UNFIT = {
    "LBFGS": "asks for the loss several times in a step",
    "SparseAdam": "takes sparse gradients only",
}


def make_optimizer(config: OptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
    """A torch.optim optimizer over these parameters. Raises UserError for a wrong name or option.

    A stage without parameters has one over a tensor that never gets a gradient.
    """
    kind = getattr(torch.optim, config.name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind is Optimizer:
        raise UserError(
            f"optimizer {config.name!r}: torch.optim has no such class; write SGD, AdamW"
        )
    if config.name in _UNFIT:
        raise UserError(f"optimizer {config.name} {_UNFIT[config.name]}: write SGD, AdamW")
    try:
        return kind(
            list(parameters.values()) or [nn.Parameter(torch.zeros(()))],
            **_fast(kind, config, parameters.values()),
        )
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"optimizer {config.name} {config.args}: {problem}") from error


def _fast(
    kind: type[Optimizer], config: OptimizerConfig, parameters: Iterable[Tensor]
) -> dict[str, Any]:
    """The arguments, with one kernel for a step where the class has it and they leave it open."""
    open_to_it = config.args.keys().isdisjoint(("foreach", "fused", "capturable", "differentiable"))
    fit = all(parameter.is_floating_point() for parameter in parameters)
    fused = open_to_it and fit and "fused" in inspect.signature(kind).parameters
    return {"fused": True} | config.args if fused else config.args


def state_tensors(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """What the optimizer remembers, as `PARAMETER/STATE` -> tensor; numbers as 0-d tensors."""
    return {
        f"{name}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def restore_state(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Puts back what `state_tensors` gave, where Optimizer.load_state_dict would.

    That is beside the parameter; the count of steps is there only where it is part of the kernel.
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
