"""What a module of the zoo is, and the list of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call."""

Make: TypeAlias = Callable[[], nn.Module]
_Make = TypeVar("_Make", bound=Make)


@dataclass(frozen=True)
class Specimen:
    """A module of the zoo.

    `inputs(n)`: what it is called with for n examples. `refused`: a pattern of the line that
    refuses it, where it is; None where training must be right. `random`: it draws, so that
    pipelines are compared with one another. `single`: in float32, the types being part of what is
    tried.
    """

    name: str
    kind: str
    make: Make
    inputs: Callable[[int], Inputs]
    refused: str | None = None
    random: bool = False
    single: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.single else torch.float64

    def model(self) -> nn.Module:
        """The same each time, in training mode."""
        torch.manual_seed(11)
        return self.make().train()

    def call(self, update: int, microbatch: int, examples: int) -> Inputs:
        """The same each time."""
        torch.manual_seed(1 + 10 * update + microbatch)
        return self.inputs(examples)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """In here modules and inputs are made in the type of this one."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


ZOO: dict[str, Specimen] = {}


def vectors(examples: int) -> Inputs:
    return (torch.randn(examples, 6),), {}


def sequences(examples: int) -> Inputs:
    """Five steps of six numbers."""
    return (torch.randn(examples, 5, 6),), {}


def pictures(examples: int) -> Inputs:
    return (torch.randn(examples, 3, 8, 8),), {}


def tokens(examples: int) -> Inputs:
    """Seven of twelve words."""
    return (torch.randint(0, 12, (examples, 7)),), {}


def specimen(inputs: Callable[[int], Inputs] = vectors, **traits: Any) -> Callable[[_Make], _Make]:
    """Puts a class of modules, or a function that makes one, into the zoo."""

    def enter(make: _Make) -> _Make:
        add(make.__name__, make, inputs, kind=make.__module__.rpartition(".")[2], **traits)
        return make

    return enter


def add(
    name: str, make: Make, inputs: Callable[[int], Inputs] = vectors, *, kind: str, **traits: Any
) -> None:
    """Puts what `make` makes into the zoo."""
    own = f"{kind}-{name}"
    assert own not in ZOO, f"{own} is there already"
    ZOO[own] = Specimen(own, kind, make, inputs, **traits)


def zoo() -> Mapping[str, Specimen]:
    """All of it, by name."""
    from zoo import kinds

    for each in pkgutil.iter_modules(kinds.__path__):
        importlib.import_module(f"zoo.kinds.{each.name}")
    return ZOO


def between(inner: nn.Module, width: int = 6) -> nn.Sequential:
    """The module with a layer before and one after, so that there is something to cut."""
    return nn.Sequential(nn.Linear(width, width), inner, nn.Linear(width, width))


def loss_of(output: Any, target: Any = None) -> Tensor:
    """A mean over all numbers that have a gradient, each in a way of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in torch.utils._pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            flat = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            flat = flat.reshape(-1).double()
            weights = torch.linspace(0.5, 1.5, flat.numel(), dtype=torch.float64)
            total = total + (weights * (flat + 0.5 * flat.square())).mean()
    return total
