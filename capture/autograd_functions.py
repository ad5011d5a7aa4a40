"""Keeps the backward passes of the user's autograd functions, which torch.export would drop.

torch.export traces only the forward pass of a `torch.autograd.Function`. During a capture each call
therefore becomes an operator of its own, `pipedream_function::NAME.callN`, which calls the function
when it runs. Hooks on the gradients of tensors, gradients taken in the forward pass and other calls
that a capture would lose are errors.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from pipedream.graph.errors import UserError

SPACE = "pipedream_function"
_library: Any = torch.library.Library(SPACE, "DEF")  # type: ignore[no-untyped-call]
_numbers = itertools.count()
_NO_SETUP_CONTEXT = Function.setup_context
_ENTER_HOOKS = saved_tensors_hooks.__enter__
_inside_operator = ContextVar("inside an operator", default=False)


_HOOK = (
    "it hooks a tensor's gradient, and the hook would be lost; write a torch.autograd.Function "
    "with the backward pass that you want"
)
_GRADIENT = (
    "it takes gradients in its forward pass, which torch.export cannot follow; compute them in "
    "the loss, or leave this part out of the model"
)
_PACKED = (
    "it packs sequences, whose lengths are data and would be frozen; pad them to one length, run "
    "the layer on the padded tensor, and take the outputs at the lengths with gather"
)
_SAVED = (
    "it changes what the backward pass keeps by saved_tensors_hooks, which would be lost; write a "
    "torch.autograd.Function, or leave them out"
)
_SEEDS = (
    "it seeds torch, but a run draws other numbers for each minibatch from the seed of its run "
    "config; leave that out, or make the numbers once, as a buffer in __init__"
)
_FREEZES = (
    "it freezes or thaws a parameter as it runs, which would be lost; do that in the factory, or "
    "cut the gradient with detach()"
)
_THREADS = "it starts a thread, whose operators would be lost; call them one after the other"
_LOST_CALLS = (
    (Tensor, "register_hook", _HOOK),
    (Tensor, "register_post_accumulate_grad_hook", _HOOK),
    (torch.autograd, "grad", _GRADIENT),
    (torch.autograd, "backward", _GRADIENT),
    (PackedSequence, "__new__", _PACKED),
    (torch, "manual_seed", _SEEDS),
    (torch.random, "manual_seed", _SEEDS),
    (threading.Thread, "start", _THREADS),
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
    with ExitStack() as patches:
        for owner, name, reason in _LOST_CALLS:
            patches.enter_context(patch.object(owner, name, _raiser(reason)))
        patches.enter_context(patch.object(saved_tensors_hooks, "__enter__", _enter_hooks))
        patches.enter_context(_FrozenAsBefore())
        patches.enter_context(patch.object(CheckpointFunction, "apply", _run_checkpointed))
        # `apply` may be bound before the export, and need not be Python. But all versions of torch
        # ask the class for its `forward` at each call.
        patches.enter_context(patch.object(type(Function), "__getattribute__", _attribute))
        yield


def _enter_hooks(hooks: saved_tensors_hooks) -> None:
    """Those of torch itself, of torch.utils.checkpoint for one, change no gradient."""
    if not is_torchs_own(type(hooks)) or type(hooks) is saved_tensors_hooks:
        raise UserError(_SAVED)
    _ENTER_HOOKS(hooks)


class _FrozenAsBefore(TorchFunctionMode):
    """Raises UserError if a parameter is frozen or thawed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.requires_grad_ or func == Tensor.requires_grad.__set__:  # type: ignore[attr-defined]
            arguments = [*args, *(kwargs or {}).values()]
            wanted = arguments[1] if len(arguments) > 1 else True
            if isinstance(arguments[0], nn.Parameter) and arguments[0].requires_grad != wanted:
                raise UserError(_FREEZES)
        return func(*args, **(kwargs or {}))


def _run_checkpointed(run: Callable[..., Any], _preserve_random_state: bool, *inputs: Any) -> Any:
    return run(*inputs)  # CheckpointFunction runs it without gradients


def is_torchs_own(function: type) -> bool:
    """Tells whether a function is part of torch, and traced as usual."""
    return function.__module__.partition(".")[0] == "torch"


def _attribute(function: type[Function], name: str) -> Any:
    """Returns `function.name`; the forward pass of a user's function is replaced by an operator."""
    value = type.__getattribute__(function, name)
    if name not in ("forward", "setup_context") or value is _NO_SETUP_CONTEXT:
        return value
    if is_torchs_own(function) or _inside_operator.get():
        return value
    return _no_context if name == "setup_context" else _forward_as_operator(function, value)


def _forward_as_operator(function: type[Function], forward: Callable[..., Any]) -> Any:
    takes_context = function.setup_context is _NO_SETUP_CONTEXT

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # called by the user, not by `apply`: has no backward pass
            return forward(*args, **kwargs)
        return _Operator(function, args[1:] if takes_context else args, kwargs)()

    return run


def _no_context(context: FunctionCtx, inputs: object, output: object) -> None:
    """Prepares nothing: the operator does so whenever it runs."""


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
        torch.library.register_fake(f"{SPACE}::{name}", self._shapes, lib=_library)
        for key in ("CompositeExplicitAutograd", "Autograd"):
            _library.impl(name, self._run, key)
        packet = getattr(getattr(torch.ops, SPACE), function.__name__)
        self.operator = getattr(packet, name.partition(".")[2])

    def __call__(self) -> Any:
        outputs = iter(self.operator(_tensors(self.leaves)))
        assert self.returned is not None
        leaves, spec = self.returned
        return pytree.tree_unflatten(
            [next(outputs) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.returned is None:
            return self._shapes(tensors)
        return _tensors(pytree.tree_leaves(self._result(tensors)))

    def _result(self, tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        apply: Any = self.function.apply
        token = _inside_operator.set(True)
        try:
            return apply(*args, **kwargs)
        finally:
            _inside_operator.reset(token)

    def _shapes(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs without data; none of them is one of the inputs."""
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
        return [torch.empty_like(leaf) for leaf in _tensors(leaves)]


def _tensors(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def autograd_nodes(results: object, seen: set[Node]) -> Iterator[Node]:
    """Yields the autograd nodes behind the tensors of a pytree; skips and extends those `seen`."""
    waiting = [tensor.grad_fn for tensor in _tensors(pytree.tree_leaves(results))]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [source for source, _ in node.next_functions]


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
