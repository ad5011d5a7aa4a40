"""The loss function and the metrics that a run config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipedream.capture.errors.user_code import blaming, load_function
from pipedream.graph.errors import UserError

Loss = Callable[[Any, Any], Tensor]
"""(what the model returns, target) -> scalar, a mean over the minibatch."""


Metric = Callable[[Any, Any], tuple[float, float]]
"""(what the model returns, target) -> a sum over the examples of the minibatch, and of how many."""


def load_loss(name: str, directory: Path) -> Loss:
    """Loads a function of torch.nn.functional by name, `package.module:function`, or `output`.

    `output` is for models that return their own loss, as a scalar or as the first of several
    outputs. Raises UserError if there is no such function.
    """
    if name == "output":
        return _own_loss
    if ":" in name:
        function = load_function(name, directory)
        if isinstance(function, type):
            raise UserError(f"loss {name}: this is a class: name a function of (output, target)")
        return checked(function, name)
    known: Any = getattr(functional, name, None)
    if not callable(known) or isinstance(known, type):
        raise UserError(
            f"loss {name!r}: torch.nn.functional has no such function; write cross_entropy, "
            "mse_loss, package.module:function, or output"
        )
    return checked(known, name)


def checked(function: Callable[..., Any], name: str) -> Loss:
    """Wraps `function` to raise UserError if it fails or returns no scalar to learn from."""

    def loss(output: Any, target: Any) -> Tensor:
        try:
            with blaming(f"loss {name}"):
                value = function(output, target)
        except UserError as error:
            raise UserError(error.format_message() + _mismatch(output, target)) from error
        return _scalar(value, f"loss {name} returns")

    return loss


def _mismatch(output: Any, target: Any) -> str:
    """Says what may be wrong with these, for a message."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or not target.numel():
        return ""
    shapes = f"; the output is {list(output.shape)}, the target {list(target.shape)}"
    if target.is_floating_point() or output.dim() < 2:
        return shapes
    least, most, classes = int(target.min()), int(target.max()), output.shape[1]
    if least >= 0 and most < classes:
        return shapes
    return f"{shapes}; targets are {least} to {most}, and the output has classes 0 to {classes - 1}"


def _own_loss(output: Any, target: Any) -> Tensor:
    outputs = output.values() if isinstance(output, dict) else output
    first = output if isinstance(output, Tensor) else next(iter(outputs))
    return _scalar(first, "loss output: the model returns first")


def _scalar(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise UserError(f"{what} a {type(value).__name__}, not a scalar tensor")
    if value.dim() or not value.is_floating_point():
        kind = f"{list(value.shape)} of {str(value.dtype)[6:]}"
        raise UserError(f"{what} a tensor {kind}, not a real scalar: take a mean")
    if torch.is_grad_enabled() and not value.requires_grad:
        raise UserError(f"{what} a value that depends on no parameter: there is nothing to learn")
    return value


def accuracy(output: Any, target: Any) -> tuple[Tensor, int] | None:
    """Returns (correct, total) for logits [..., classes] and targets [...], else None; the first is
    a scalar where these are, which nobody has looked at.
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    if target.is_floating_point() or output.shape[:-1] != target.shape:
        return None
    return (output.argmax(-1) == target).sum(), target.numel()


def load_metrics(named: Mapping[str, str], directory: Path) -> dict[str, Metric]:
    """Loads the functions `package.module:function` of `held_out_metrics`. Raises UserError."""
    return {name: _metric(name, source, directory) for name, source in named.items()}


def _metric(name: str, source: str, directory: Path) -> Metric:
    """Returns the function, which raises UserError if it fails or returns no pair of numbers."""
    function, what = load_function(source, directory), f"held_out_metrics.{name}"

    def metric(output: Any, target: Any) -> tuple[float, float]:
        with blaming(f"{what}: {source}"):
            value = function(output, target)
        pair = [_number(each) for each in value] if isinstance(value, (tuple, list)) else []
        if len(pair) != 2 or pair[0] is None or pair[1] is None or pair[1] < 0:
            raise UserError(
                f"{what}: {source} returns {_described(value)}: return (sum, count), the sum over "
                "the examples of the minibatch and of how many values"
            )
        return pair[0], pair[1]

    return metric


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return None if value.numel() != 1 or value.is_complex() else float(value)
    return float(value) if isinstance(value, Real) else None


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    several = isinstance(value, (tuple, list))
    inside = f" ({', '.join(map(_described, value))})" if several else ""
    return f"a {type(value).__name__}{inside}"[:200]
