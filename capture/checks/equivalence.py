"""Compares a captured model with the model that it was captured from, on real inputs.

A capture may leave out, freeze or reorder what a model does without anybody's notice. So before it
is trained, both run forward and backward on the same inputs, and everything that training sees of
them is compared: outputs, loss, gradients, buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream.capture.captured import Captured, flatten_inputs, rebuild
from pipedream.capture.checks.rounding import ComputeTypes, moved_at_random
from pipedream.graph.errors import UserError

Figures: TypeAlias = Mapping[str, Tensor | None]
"""What passes gave, by a name for messages, such as `the gradient of fc.weight`."""

_RELATIVE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""By how much of its size a figure may differ, in each type that operators may compute in."""

_OF_ROUNDING = 3.0
"""A figure may differ by so many times what it changes by if numbers are rounded otherwise."""

_OF_ALL = 1e-3
"""A gradient may also differ by this part of the relative difference of all gradients together:
some are zero but for rounding.
"""


@dataclass(frozen=True)
class Tolerance:
    """Says by how much a figure may differ between two ways to compute it.

    `relative`: in parts of its size; `rounding`: by name in which part of its size it changes if
    all parameters are rounded once; `gradients`: root mean square of an element of all gradients.
    """

    relative: float
    rounding: Mapping[str, float]
    gradients: float

    @staticmethod
    def of(figures: Figures, rounded: Figures, dtype: torch.dtype) -> Tolerance:
        """Returns the tolerance in `dtype`. `rounded`: figures of parameters that were rounded."""
        rounding, squares, elements = dict[str, float](), 0.0, 0
        for name, figure in figures.items():
            if figure is None:
                continue
            size = _norm(figure)
            changed = distance(figure, rounded.get(name), is_gradient(name))
            rounding[name] = changed / size if size else 0.0
            if is_gradient(name):
                squares, elements = squares + size**2, elements + figure.numel()
        return Tolerance(_RELATIVE[dtype], rounding, math.sqrt(squares / max(1, elements)))

    @property
    def of_lower_type(self) -> bool:
        """Tells whether small figures may be nothing but rounding."""
        return self.relative > _RELATIVE[torch.float32]

    def most(
        self,
        name: str,
        value: Tensor,
        rounded: Tensor | None = None,
        jumped: Tensor | None = None,
    ) -> float:
        """Returns the largest distance from this figure, as `distance` has it. `rounded`: the same
        figure where all numbers were rounded otherwise; `jumped`: that of parameters moved by
        `relative`, so that derivatives jump that seldom do for rounding; if they are known.
        """
        size = _norm(value)
        most = max(self.relative, _OF_ROUNDING * self.rounding.get(name, 0.0)) * size
        if is_gradient(name):
            typical = self.gradients * math.sqrt(value.numel())
            most = max(most, _OF_ALL * self.relative * typical)
            if jumped is not None:
                most = max(most, distance(value, jumped, gradients=True))
        if rounded is not None:
            most = max(most, _OF_ROUNDING * distance(value, rounded, is_gradient(name)))
        return most


def gradient_of(name: str) -> str:
    """Returns what the gradient of a parameter is called."""
    return f"{_GRADIENT}{name}"


def buffer_of(name: str) -> str:
    """Returns what a buffer after the forward pass is called."""
    return f"buffer {name}"


_GRADIENT = "the gradient of "


def is_gradient(name: str) -> bool:
    """Tells whether a figure is the gradient of a parameter."""
    return name.startswith(_GRADIENT)


def check_equivalence(
    model: nn.Module,
    captured: Captured,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None = None,
) -> Tolerance | None:
    """Raises UserError if the captured model computes something else than `model` does.

    `captured` was captured for such inputs, and shares parameters and buffers with `model`, which
    is in the same mode. Without a `loss` of what the model returns, only the forward pass is
    compared. Buffers are as before afterwards, and so
    are torch's random numbers.

    Returns by how much figures of these passes may differ; None without a `loss`.
    """
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    inputs = flatten_inputs(args, kwargs)

    def of_model() -> Any:
        return model(*args, **kwargs)

    def of_captured(tensors: Mapping[str, Tensor] = {}) -> Any:
        results = functional_call(captured.module, dict(tensors), tuple(inputs))
        return rebuild(results, captured.out_spec)

    def passes(run: Callable[[], Any], learned: Mapping[str, Tensor]) -> Figures:
        with _unchanged_buffers(model) as buffers, _fixed_draws(model):
            with captured.precision.capturing():
                output = run()
                value = None if loss is None else loss(output)
            figures = {**_outputs(output), **buffers()}
            return figures if value is None else {**figures, **of_loss(value, learned)}

    with torch.set_grad_enabled(loss is not None):
        with ComputeTypes() as used:
            expected = passes(of_model, parameters)
        actual = passes(of_captured, parameters)
        dtype = _coarsest({each.dtype.to_real() for each in model.parameters()} | used.types)
        if loss is None:
            _compare(model, expected, actual, Tolerance(_RELATIVE[dtype], {}, 0.0))
            return None
        rounded = moved_at_random(parameters, torch.finfo(dtype).eps)
        tolerance = Tolerance.of(actual, passes(lambda: of_captured(rounded), rounded), dtype)
    _compare(model, expected, actual, tolerance)
    return tolerance


def _compare(model: nn.Module, original: Figures, actual: Figures, tolerance: Tolerance) -> None:
    name = type(model).__name__
    if original.keys() != actual.keys():
        raise UserError(
            f"self-check: {name} gives {', '.join(original)}, and captured {', '.join(actual)}"
        )
    for what, expected in original.items():
        reference = expected if expected is not None else actual[what]
        if reference is None:
            continue
        most = tolerance.most(what, reference)
        if (apart := distance(expected, actual[what], is_gradient(what))) > most:
            raise UserError(difference(what, f"{name} as captured", apart, _norm(reference), most))


def difference(what: str, where: str, apart: float, size: float, most: float) -> str:
    """Writes the message for a figure that differs."""
    return (
        f"self-check: {what} in {where} differs from the model's own by {apart:.3g} (it is "
        f"{size:.3g} large; rounding explains {most:.2g}): this would train something else; please "
        "report it; --unchecked (checked=False) trains all the same"
    )


def distance(one: Tensor | None, other: Tensor | None, gradients: bool = False) -> float:
    """Returns the norm of the difference; infinite for other shapes or types, or if one alone is
    finite.

    A missing gradient counts as zero.
    """
    if one is None or other is None:
        there = one if other is None else other
        return 0.0 if there is None else _norm(there) if gradients else math.inf
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if one.numel() == 0 or torch.equal(one, other):
        return 0.0
    if one.is_floating_point() and math.isfinite(norm := _norm_at_once(one - other)):
        return norm
    a, b = (as_double(each) for each in (one, other))
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return math.inf
    return float(torch.where(finite, a - b, 0.0).norm())


def as_double(tensor: Tensor) -> Tensor:
    """Returns its numbers in float64, those of complex ones in pairs."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def _norm(tensor: Tensor) -> float:
    if tensor.is_floating_point() and math.isfinite(norm := _norm_at_once(tensor)):
        return norm
    double = as_double(tensor)
    return float(double[double.isfinite()].norm()) if double.numel() else 0.0


def _norm_at_once(tensor: Tensor) -> float:
    """Returns the norm without copies in float64: models are large."""
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))


def _coarsest(types: Set[torch.dtype]) -> torch.dtype:
    return max(types & _RELATIVE.keys(), key=_RELATIVE.__getitem__, default=torch.float64)


def any_loss(output: Any) -> Tensor:
    """Returns a number that depends on each element of what a model returns differently."""
    generator, total = torch.Generator().manual_seed(0), torch.zeros((), dtype=torch.float64)
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            weights = torch.rand(real.shape, generator=generator) + 0.5
            total = total.to(real.device) + (real.double() * weights.to(real.device)).sum()
    return total


def of_loss(value: Tensor, parameters: Mapping[str, Tensor]) -> Figures:
    """Returns the loss, and its gradients by these parameters."""
    if not value.requires_grad or not parameters:
        return {"the loss": value.detach()}
    before = [parameter.grad for parameter in parameters.values()]
    try:
        for parameter in parameters.values():
            parameter.grad = None
        value.backward()  # type: ignore[no-untyped-call] # not `grad`: some code refuses that
        gradients = {
            gradient_of(name): None if each.grad is None else each.grad.to_dense()
            for name, each in parameters.items()
        }
    finally:
        for parameter, gradient in zip(parameters.values(), before, strict=True):
            parameter.grad = gradient
    return {"the loss": value.detach(), **gradients}


def _outputs(output: Any) -> Figures:
    """Returns the tensors that a model returns, and in their names what else it returns."""
    leaves = pytree.tree_leaves(output)
    return {
        f"output {number} ({type(leaf).__name__}{'' if isinstance(leaf, Tensor) else f' {leaf}'})"
        f" of {len(leaves)}": leaf.detach().clone() if isinstance(leaf, Tensor) else None
        for number, leaf in enumerate(leaves)
    }


@contextmanager
def _unchanged_buffers(model: nn.Module) -> Iterator[Callable[[], Figures]]:
    """Yields what gives copies of the buffers as they are; they are as before on exit."""
    before = [
        (part, name, buffer, buffer.clone())
        for part in model.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    try:
        yield lambda: {buffer_of(n): b.detach().clone() for n, b in model.named_buffers()}
    finally:
        for part, name, buffer, value in before:
            part._buffers[name] = buffer
            restore(buffer, value)


def restore(buffer: Tensor, value: Tensor) -> None:
    """Restores a buffer if it has changed: a view of shared elements cannot be written."""
    if not torch.equal(buffer, value):
        with torch.no_grad():
            buffer.copy_(value)


class _FixedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds before every random operator alike: so it does not matter how many there are before."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            torch.manual_seed(0)
        return func(*args, **(kwargs or {}))


@contextmanager
def _fixed_draws(model: nn.Module) -> Iterator[None]:
    tensors = (*model.parameters(), *model.buffers())
    gpus = {each.device for each in tensors if each.device.type == "cuda"}
    with torch.random.fork_rng(gpus), _FixedDraws():  # type: ignore[no-untyped-call]
        yield
