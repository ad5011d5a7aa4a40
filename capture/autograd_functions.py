"""What the user's model says of its backward pass, which torch.export would lose without a word.

It follows the forward pass of a `torch.autograd.Function` alone. So while a model is captured each
call becomes an operator of its own, `pipedream_function::NAME.callN`, which calls the function when
it runs. Hooks on the gradients of tensors, and gradients taken in the forward pass, are refused.
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
    "it hooks a tensor's gradient, which would not be called; write a torch.autograd.Function "
    "with the backward pass you want"
)
_GRADIENT = (
    "it takes gradients in its forward pass, which torch.export cannot follow; compute them in "
    "the loss, or leave this part out of the model"
)
_LOST = (
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
    """While a model is exported in here, its autograd functions become operators.

    Those of torch itself (such as of torch.utils.checkpoint) are followed: their backward pass is
    that of what they call. Inside raises UserError where a function cannot be an operator, or what
    is asked of the backward pass would be lost.
    """
    # Function.apply ends in a call of this; the user may hold that bound to his class already.
    single_level: Any = Function.__mro__[1]
    assert "apply" not in vars(single_level)
    single_level.apply = classmethod(_apply)
    try:
        with ExitStack() as patches:
            for owner, name, reason in _LOST:
                patches.enter_context(patch.object(owner, name, _raiser(reason)))
            yield
    finally:
        del single_level.apply


def _apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    if function is CheckpointFunction:  # it runs without gradients what its backward runs again
        run, _preserve_random_state, *given = args
        return run(*given)
    if function.__module__.partition(".")[0] == "torch":
        return _call(function, args, kwargs)
    operator = _Operator(function, args, kwargs)
    return operator(*operator.tensors(args, kwargs))


def _call(function: type[Function], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What Function.apply calls in the end."""
    base: Any = super(Function.__mro__[1], function)
    return base.apply(*args, **kwargs)


class _Operator:
    """One call of `function`; what is no tensor among its arguments stays as it is."""

    def __init__(self, function: type[Function], args: Sequence[Any], kwargs: Any) -> None:
        self.function = function
        self.leaves, self.spec = pytree.tree_flatten((tuple(args), kwargs))
        for leaf in self.leaves:
            if isinstance(leaf, nn.Module) or (callable(leaf) and not isinstance(leaf, Tensor)):
                raise UserError(
                    f"autograd function {function.__name__} is given {type(leaf).__name__}, whose "
                    "parameters and operators would go unseen: call that outside of it, and give "
                    "it tensors"
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
        made = iter(self.operator(list(tensors)))
        assert self.returned is not None
        leaves, spec = self.returned
        return pytree.tree_unflatten(
            [next(made) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.returned is None:
            return self._shapes(tensors)
        made = pytree.tree_leaves(self._result(tensors))
        return [leaf for leaf in made if isinstance(leaf, Tensor)]

    def _result(self, tensors: Sequence[Tensor]) -> Any:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return _call(self.function, args, kwargs)

    def _shapes(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs without data, none of them one of the inputs."""
        versions = [tensor._version for tensor in tensors]
        with _OnlyGiven(self.function.__name__, tensors):
            result = self._result(tensors)
        if versions != [tensor._version for tensor in tensors]:
            raise UserError(
                f"autograd function {self.function.__name__} writes into its input: give it a "
                "clone, or return a new tensor"
            )
        leaves, spec = pytree.tree_flatten(result)
        self.returned = leaves, spec
        return [  # of no leaf: those may not be written in place
            torch.empty_like(leaf).requires_grad_(leaf.requires_grad).clone()
            for leaf in leaves
            if isinstance(leaf, Tensor)
        ]


class _OnlyGiven(TorchFunctionMode):
    """Refuses parameters that a function reads without being given them."""

    def __init__(self, name: str, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.name = name
        self.given = {id(tensor) for tensor in given}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in self.given:
                raise UserError(
                    f"autograd function {self.name} reads a parameter that it is not given: make "
                    "it an argument of apply"
                )
        return func(*args, **(kwargs or {}))
