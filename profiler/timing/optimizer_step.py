"""What an update of the weights takes, and what the optimizer keeps for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipedream.capture.export import Captured
from pipedream.profiler.timing.stopwatch import Stopwatch, stopwatch

OPTIMIZERS: Mapping[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "sgd": lambda held: torch.optim.SGD(held, 1e-3, fused=True),
    "momentum": lambda held: torch.optim.SGD(held, 1e-3, momentum=0.9, fused=True),
    "adam": lambda held: torch.optim.Adam(held, 1e-3, fused=True),
}
"""By the names that pd-optimize has for them, with one kernel for a step, as pd-train has it."""

_MOST_BYTES = 1 << 28
"""Of parameters: more than caches hold. Larger models are timed on the first so many."""
_REPEATS = 5

State: TypeAlias = Mapping[str, int]
"""Bytes of each parameter, by name."""


@dataclass(frozen=True)
class UpdateCost:
    """Parameter bytes that go through a step in a second, and the bytes kept for each parameter."""

    bytes_per_second: float
    state: State


def updates(captured: Captured, device: torch.device) -> dict[str, UpdateCost]:
    """For each of `OPTIMIZERS`; none for a model with nothing to learn."""
    learning = {
        name: parameter
        for name, parameter in captured.module.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    }
    timed: dict[str, Tensor] = {}
    for name, parameter in learning.items():
        if not timed or _bytes([*timed.values(), parameter]) <= _MOST_BYTES:
            timed[name] = parameter
    watch: Stopwatch[Any] = stopwatch(device)
    return {kind: _update(kind, timed, learning, watch, device) for kind in OPTIMIZERS if timed}


def _update(
    kind: str,
    timed: Mapping[str, Tensor],
    learning: Mapping[str, Tensor],
    watch: Stopwatch[Any],
    device: torch.device,
) -> UpdateCost:
    # Of a model without memory, too.
    held = [
        torch.zeros(value.shape, dtype=value.dtype, device=device, requires_grad=True)
        for value in timed.values()
    ]
    for value in held:
        value.grad = torch.full_like(value, 1e-3)
    optimizer = OPTIMIZERS[kind](held)
    spare = [torch.empty_like(value.data) for value in held]
    optimizer.step()
    seconds = [_seconds(optimizer, held, spare, watch) for _ in range(_REPEATS)]
    kept = [sum(_bytes([v]) for v in optimizer.state[p].values() if v.dim()) for p in held]
    each = sum(kept) / _bytes(held)
    state = {name: round(each * _bytes([value])) for name, value in learning.items()}
    return UpdateCost(_bytes(held) / statistics.median(seconds), state)


def _seconds(
    optimizer: Optimizer,
    held: Sequence[Tensor],
    spare: Sequence[Tensor],
    watch: Stopwatch[Any],
) -> float:
    """One update as with weight stashing: the old version stays, the step is done on a copy."""
    watch.clear()
    start = watch.mark()
    for parameter, memory in zip(held, spare, strict=True):
        parameter.data.copy_(memory)
    optimizer.step()
    return watch.seconds(start, watch.mark())


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
