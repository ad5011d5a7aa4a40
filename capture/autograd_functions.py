"""Keeps the backward passes of the user's autograd functions, which torch.export would drop.

torch.export traces only the forward pass of a `torch.autograd.Function`. During a capture each call
therefore becomes an operator of its own, `pipedream_function::NAME.callN`, which calls the function
when it runs. Hooks on the gradients of tensors and gradients taken in the forward pass are errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from pipedream.graph.errors import UserError

_SPACE = "pipedream_function"
_library: Any = torch.library.Library(_SPACE, "DEF")  # type: ignore[no-untyped-call]
_numbers = itertools.count()


_HOOK = (
    "it hooks a tensor's gradient, and the hook would be lost; write a torch.autograd.Function "
    "with the backward pass that you want"
)
_GRADIENT = (
    "it takes gradients in its forward pass, which torch.export cannot follow; compute them in "
    "the loss, or leave this part out of the model"
)
_LOST_CALLS = (
    (Tensor, "register_hook", _HOOK),
    (Tensor, "register_post_accumulate_grad_hook", _HOOK),
    (torch.autograd, "grad", _GRADIENT),
    (torch.autograd, "backward", _GRADIENT),
)


def _raiser(reason: str) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> None:
        raise UserError(reason)

    return fail


@contextmanager
def functions_as_operators() -> Iterator[None]:
    """Turns autograd functions into operators while a model is exported inside this context.

    Functions of torch itself, such as torch.utils.checkpoint, are traced as usual. The export
    raises UserError if a function cannot become an operator, or if part of the backward pass would
    be lost.
    """
    # Function.apply ends in a call of this method; Function.apply itself may already be bound.
    single_level: Any = Function.__mro__[1]
    assert "apply" not in vars(single_level)
    single_level.apply = classmethod(_apply)
    try:
        with ExitStack() as patches:
            for owner, name, reason in _LOST_CALLS:
                patches.enter_context(patch.object(owner, name, _raiser(reason)))
            yield
    finally:
        del single_level.apply


def _apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    if function is CheckpointFunction:  # its forward runs without gradients
        run, _preserve_random_state, *inputs = args
        return run(*inputs)
    if function.__module__.partition(".")[0] == "torch":
        return _call(function, args, kwargs)
    operator = _Operator(function, args, kwargs)
    return operator(*operator.tensors(args, kwargs))


def _call(function: type[Function], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls the function as Function.apply does, past the patched method."""
    base: Any = super(Function.__mro__[1], function)
    return base.apply(*args, **kwargs)


class _Operator:
    """One call of `function` as an operator of its tensors; other arguments are constants."""

    def __init__(self, function: type[Function], args: Sequence[Any], kwargs: Any) -> None:
        self.function = function
        self.leaves, self.spec = pytree.tree_flatten((tuple(args), kwargs))
        for leaf in self.leaves:
            if isinstance(leaf, nn.Module) or (callable(leaf) and not isinstance(leaf, Tensor)):
                raise UserError(
                    f"autograd function {function.__name__} is given {type(leaf).__name__}, whose "
                    "parameters and operators would not be captured: call it outside the function "
                    "and pass tensors"
                )
        self.returned: tuple[list[Any], pytree.TreeSpec] | None = None
        name = f"{function.__name__}.call{next(_numbers)}"
        _library.define(f"{name}(Tensor[] inputs) -> Tensor[]")
        torch.library.register_fake(f"{_SPACE}::{name}", self._shapes, lib=_library)
        for key in ("CompositeExplicitAutograd", "Autograd"):
            _library.impl(name, self._run, key)
        packet = getattr(getattr(torch.ops, _SPACE), function.__name__)
        self.operator = getattr(packet, name.partition(".")[2])

    @staticmethod
    def tensors(args: Sequence[Any], kwargs: Any) -> list[Tensor]:
        leaves = pytree.tree_leaves((tuple(args), kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def __call__(self, *tensors: Tensor) -> Any:
        outputs = iter(self.operator(list(tensors)))
        assert self.returned is not None
        leaves, spec = self.returned
        return pytree.tree_unflatten(
            [next(outputs) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.returned is None:
            return self._shapes(tensors)
        leaves = pytree.tree_leaves(self._result(tensors))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _result(self, tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return _call(self.function, args, kwargs)

    def _shapes(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs without data; none of them is one of the inputs."""
        versions = [tensor._version for tensor in tensors]
        with _NoHiddenParameters(self.function.__name__, tensors):
            result = self._result(tensors)
        if versions != [tensor._version for tensor in tensors]:
            raise UserError(
                f"autograd function {self.function.__name__} writes into its input: pass a "
                "clone, or return a new tensor"
            )
        leaves, spec = pytree.tree_flatten(result)
        self.returned = leaves, spec
        return [  # clones, because leaves may not be written in place
            torch.empty_like(leaf).requires_grad_(leaf.requires_grad).clone()
            for leaf in leaves
            if isinstance(leaf, Tensor)
        ]


class _NoHiddenParameters(TorchFunctionMode):
    """Raises UserError if a function reads a parameter that is not one of its arguments."""

    def __init__(self, name: str, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.name = name
        self.arguments = {id(tensor) for tensor in arguments}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in self.arguments:
                raise UserError(
                    f"autograd function {self.name} reads a parameter that it is not given: make "
                    "it an argument of apply"
                )
        return func(*args, **(kwargs or {}))
