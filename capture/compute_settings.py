"""Settings under which a model is profiled and trained: precision, modes, the memory allocator."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

_Tree = TypeVar("_Tree")

CPU = torch.device("cpu")

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of mallopt, from malloc.h."""
_NEVER = 2**31 - 1
_LARGE = 2**17
_USER_SETTINGS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
)


def keep_freed_memory() -> None:
    """Makes glibc keep freed blocks for the next use.

    By default glibc returns large ones to the kernel, and every activation and gradient then costs
    a page fault per 4 KiB: the gradient of a layer of 400 MB more than to compute it. Settings in
    the environment take precedence. Other allocators are not affected.
    """
    _set_allocator({_TRIM_THRESHOLD: _NEVER, _MMAP_MAX: 0})


def return_freed_memory() -> None:
    """Makes glibc return blocks of 128 KiB or more to the kernel as soon as they are freed.

    For what comes before training: the passes of a capture and of a self-check are done once, and
    what Python keeps of them would lie scattered between their tensors, in a heap that is then
    mostly holes. Settings in the environment take precedence, as with `keep_freed_memory`.
    """
    _set_allocator({_TRIM_THRESHOLD: _LARGE, _MMAP_THRESHOLD: _LARGE})


def _set_allocator(settings: Mapping[int, int]) -> None:
    if not os.environ.keys().isdisjoint(_USER_SETTINGS):
        return
    with suppress(OSError, AttributeError):  # glibc's
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in settings.items():
            mallopt(parameter, value)


@dataclass(frozen=True)
class Precision:
    """Says in which types operators compute on `device`: in those of what they read, or with
    `autocast` in that lower one where torch considers it safe.
    """

    autocast: str | None = None
    device: torch.device = CPU

    def computing(self) -> torch.autocast:
        """Returns a context for passes, which can be entered again; a caller's autocast ends."""
        return _autocast(self.autocast, self.device)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Gives user code the context of a pass while its tensors are on the CPU."""
        with ExitStack() as entered:
            for device in {self.device, CPU}:
                entered.enter_context(_autocast(self.autocast, device))
            yield


IN_FULL = Precision()


def _autocast(lower: str | None, device: torch.device) -> torch.autocast:
    if lower is None:
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype=getattr(torch, lower))


def placed(arguments: _Tree, device: torch.device) -> _Tree:
    """Returns arguments of an operator with every device among them replaced, by position too:
    `x.to(y.device)` is captured as one with the device of the capture.
    """
    mapped: _Tree = pytree.tree_map_only(torch.device, lambda _: device, arguments)
    return mapped


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts all modules in eval mode within, and each in its own mode again afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def to_train(model: nn.Module) -> nn.Module:
    """Puts a model in training mode, but for modules that its maker has left in eval mode, such as
    batch norm that is not to learn; a model that is wholly in eval mode, such as a pretrained one,
    is trained whole.
    """
    modules = list(model.modules())
    kept = [module for module in modules if not module.training]
    model.train()
    if len(kept) < len(modules):
        for module in kept:
            module.training = False
    return model
