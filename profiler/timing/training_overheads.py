"""What training takes beside the passes: steps of the optimizer, its state, reading of data."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipedream.capture.captured import Captured
from pipedream.capture.sources.load import Loaded
from pipedream.profiler.timing.muon_steps import hidden_matrices, matrix_seconds
from pipedream.profiler.timing.stopwatch import Stopwatch, stopwatch

OPTIMIZERS: Mapping[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-3, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-3, fused=True),
}
"""By the names of pd-optimize; fused, as in pd-train."""

MUON = "muon"
"""As pd-optimize calls it: with AdamW for what Muon is not for."""

_MOST_BYTES = 1 << 28
"""The most bytes of parameters to time: more than caches hold."""
_OTHER_BYTES = 1 << 26
"""Written between two updates, as passes do that leave little of the weights in the caches."""
_REPEATS = 5
_FEWEST_READS, _MOST_READS, _READING_SECONDS = 3, 20, 2.0

State: TypeAlias = Mapping[str, int]
"""Bytes of state by parameter name."""


@dataclass(frozen=True)
class UpdateCost:
    """Bytes of parameters per second of a step with a copy of the old version, and the state of
    each parameter; the seconds of each, by name, if they are not as its bytes; bytes of parameters
    per second without the copy, if known.
    """

    bytes_per_second: float
    state: State
    seconds: Mapping[str, float] | None = None
    in_place_bytes_per_second: float | None = None

    def of_muon(self, learned: Mapping[str, Tensor], own: Mapping[str, float]) -> UpdateCost:
        """Returns the cost of Muon, whose matrices take `own` seconds; this is that of AdamW, for
        all other parameters.
        """
        seconds = {
            name: own[name] if name in own else value.nbytes / self.bytes_per_second
            for name, value in learned.items()
        }
        state = {n: v.nbytes if n in own else self.state[n] for n, v in learned.items()}
        return UpdateCost(_bytes(learned.values()) / sum(seconds.values()), state, seconds)


def updates(captured: Captured, device: torch.device) -> dict[str, UpdateCost]:
    """Returns the cost of each of `OPTIMIZERS` and of `MUON`, if that has a matrix to learn; empty
    for a model without trainable parameters.
    """
    learned = trainable(captured)
    timed, watch = _timed(learned), stopwatch(device)
    costs = {kind: _update(kind, timed, learned, watch, device) for kind in OPTIMIZERS if timed}
    matrices = hidden_matrices(captured, learned)
    if matrices:
        costs[MUON] = costs["adam"].of_muon(learned, matrix_seconds(matrices, device))
    return costs


def gradient_sum_rate(captured: Captured, device: torch.device) -> float | None:
    """Returns the bytes of gradients per second that are added to those of the minibatches before
    them in a round; None for a model without trainable parameters.

    A gradient has just been computed; the sum was last used a whole minibatch before.
    """
    timed, watch = _timed(trainable(captured)).values(), stopwatch(device)
    if not timed:
        return None
    values = [torch.full_like(value, 1e-3, requires_grad=False) for value in timed]
    sums, computed = ([torch.zeros_like(value) for value in values] for _ in range(2))
    other = torch.ones(_OTHER_BYTES // 4, device=device)
    seconds = []
    for _ in range(_REPEATS):
        other.zero_()
        seconds.append(0.0)
        for whole, gradient, value in zip(sums, computed, values, strict=True):
            gradient.copy_(value)
            watch.clear()
            watch.lead()
            start = watch.mark()
            whole.add_(gradient)
            seconds[-1] += watch.seconds(start, watch.mark())
    return _bytes(values) / statistics.median(seconds)


def trainable(captured: Captured) -> dict[str, Tensor]:
    """Returns the parameters that an optimizer would change, by name."""
    return {
        name: parameter
        for name, parameter in captured.module.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    }


def _timed(learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the first parameters, as many as are timed."""
    timed: dict[str, Tensor] = {}
    for name, parameter in learned.items():
        if not timed or _bytes([*timed.values(), parameter]) <= _MOST_BYTES:
            timed[name] = parameter
    return timed


def _update(
    kind: str,
    timed: Mapping[str, Tensor],
    learned: Mapping[str, Tensor],
    watch: Stopwatch,
    device: torch.device,
) -> UpdateCost:
    parameters = [
        torch.zeros(value.shape, dtype=value.dtype, device=device, requires_grad=True)
        for value in timed.values()
    ]
    for value in parameters:
        value.grad = torch.full_like(value, 1e-3)
    optimizer = OPTIMIZERS[kind](parameters)
    # Not empty: on a CPU that may be one page of memory, which stays in its cache.
    spare = [torch.full_like(value.data, 1e-3) for value in parameters]
    other = torch.ones(_OTHER_BYTES // 4, device=device)
    optimizer.step()
    seconds = []
    for _ in range(_REPEATS):
        other.zero_()
        seconds.append(_seconds(optimizer, parameters, spare, watch))
    kept = [sum(v.nbytes for v in optimizer.state[p].values() if v.dim()) for p in parameters]
    each = sum(kept) / _bytes(parameters)
    state = {name: round(each * value.nbytes) for name, value in learned.items()}
    size = _bytes(parameters)
    whole, in_place = (size / statistics.median(taken) for taken in zip(*seconds, strict=True))
    return UpdateCost(whole, state, in_place_bytes_per_second=in_place)


def _seconds(
    optimizer: Optimizer, parameters: Sequence[Tensor], spare: Sequence[Tensor], watch: Stopwatch
) -> tuple[float, float]:
    """Times one update with weight stashing and a sum of gradients, as replicas and rounds of
    several minibatches have: their mean, a copy of the old version, then the step. Returns the
    seconds of all, and those without the copy.
    """
    watch.clear()
    watch.lead()
    start = watch.mark()
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.div_(2)
    averaged = watch.mark()
    for parameter, memory in zip(parameters, spare, strict=True):
        parameter.data.copy_(memory)
    copied = watch.mark()
    optimizer.step()
    end = watch.mark()
    return watch.seconds(start, end), watch.seconds(start, averaged) + watch.seconds(copied, end)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def reading_seconds(loaded: Loaded, batch_size: int, device: torch.device) -> float | None:
    """Returns the CPU seconds of reading a minibatch of random examples: the median over several.

    A run reads in a thread that shares the interpreter and the core with the passes, which take
    longer by this time. None without data and for passes on another device. Raises UserError if the
    data cannot be read.
    """
    if loaded.read is None or device.type != "cpu":
        return None
    draw = random.Random(0)
    seconds: list[float] = []
    end = time.monotonic() + _READING_SECONDS
    while len(seconds) < _FEWEST_READS or (len(seconds) < _MOST_READS and time.monotonic() < end):
        chosen = draw.sample(range(loaded.examples), batch_size)
        begin = time.thread_time()
        loaded.read(chosen)
        seconds.append(time.thread_time() - begin)
    return statistics.median(seconds)
