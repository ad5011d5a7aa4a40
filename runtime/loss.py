"""The loss that a run config names, as a function of what the model returns and the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional

from pipedream.graph.command import UserError
from pipedream.profiler.source import load_function

Loss = Callable[[Any, Any], Tensor]
"""(what the model returns, target) -> scalar, a mean over the minibatch."""


def load_loss(name: str, directory: Path) -> Loss:
    """A function of torch.nn.functional by name, `package.module:function`, or `output`.

    `output` is for models that return their own loss, as a scalar or as the first of several
    outputs. Raises UserError if there is no such function.
    """
    if name == "output":
        return _own_loss
    if ":" in name:
        return checked(load_function(name, directory), name)
    function = getattr(functional, name, None)
    if not callable(function):
        raise UserError(
            f"loss {name!r}: torch.nn.functional has no such function; write cross_entropy, "
            "mse_loss, package.module:function, or output"
        )
    return checked(function, name)


def checked(function: Callable[..., Any], name: str) -> Loss:
    """`function`, with a line for the user where it gives anything but a scalar tensor."""

    def loss(output: Any, target: Any) -> Tensor:
        try:
            value = function(output, target)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise UserError(f"loss {name}: {type(error).__name__}: {error}") from error
        if not isinstance(value, Tensor) or value.dim():
            kind = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"loss {name} gives {kind}, not a scalar tensor")
        return value

    return loss


def _own_loss(output: Any, target: Any) -> Tensor:
    first = output if isinstance(output, Tensor) else next(iter(_values(output)))
    if not isinstance(first, Tensor) or first.dim():
        raise UserError("loss output: the model's first output is no scalar tensor")
    return first


def _values(output: Any) -> Any:
    return output.values() if isinstance(output, dict) else output


def accuracy(output: Any, target: Any) -> tuple[int, int] | None:
    """How many of how many predictions are right, for logits [..., classes] and targets [...]."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    if target.is_floating_point() or output.shape[:-1] != target.shape:
        return None
    return int((output.argmax(-1) == target).sum()), target.numel()
