"""Steps of Muon, matrix by matrix: five of Newton-Schulz, which no other optimizer has.

A step takes a matrix as many flops as its sides say, whatever its bytes, and all that Muon is not
for takes what a step of AdamW does. So a step is timed for each shape of the model's own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipedream.capture.captured import Captured
from pipedream.capture.programs.parameter_roles import Role, roles
from pipedream.profiler.timing.stopwatch import Stopwatch, stopwatch

NEWTON_SCHULZ = 5
"""Steps of the iteration, as torch.optim.Muon does by default."""

_MOST_FLOPS = 2e10
"""Of a step that is timed; a larger matrix is timed smaller, and the time scaled."""
_REPEATS = 3


def hidden_matrices(captured: Captured, learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns those of the parameters `learned` that Muon is for, by name."""
    known = roles(captured)
    return {name: each for name, each in learned.items() if known[name] is Role.HIDDEN}


def newton_schulz_products(shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns the rows, columns and the sum's length of the products of one Muon step.

    Of m x n, m <= n, each step has A = X X^T, A A and (b A + c A A) X.
    """
    short, long = sorted(shape)
    each = [(short, short, long), (short, short, short), (short, long, short)]
    return NEWTON_SCHULZ * each


def newton_schulz_flops(shape: Sequence[int]) -> float:
    """5 (4 m^2 n + 2 m^3)"""
    return float(sum(2 * math.prod(sizes) for sizes in newton_schulz_products(shape)))


def matrix_seconds(matrices: Mapping[str, Tensor], device: torch.device) -> dict[str, float]:
    """Returns the seconds of an update of each matrix; those of a shape and type count as equal."""
    watch, known = stopwatch(device), dict[tuple[torch.Size, torch.dtype], float]()
    for matrix in matrices.values():
        key = matrix.shape, matrix.dtype
        if key not in known:
            known[key] = _seconds_of(*key, watch, device)
    return {name: known[each.shape, each.dtype] for name, each in matrices.items()}


def _seconds_of(
    shape: torch.Size, dtype: torch.dtype, watch: Stopwatch, device: torch.device
) -> float:
    flops = newton_schulz_flops(shape)
    factor = max(1.0, flops / _MOST_FLOPS) ** (1 / 3)
    timed = [max(1, round(size / factor)) for size in shape]
    matrix = torch.full(timed, 1e-3, dtype=dtype, device=device, requires_grad=True)
    matrix.grad = torch.rand(timed, dtype=dtype, device=device)
    optimizer: Optimizer = torch.optim.Muon([matrix])
    spare = torch.full_like(matrix.data, 1e-3)
    optimizer.step()
    seconds = [_seconds(optimizer, matrix, spare, watch) for _ in range(_REPEATS)]
    return statistics.median(seconds) * flops / newton_schulz_flops(timed)


def _seconds(optimizer: Optimizer, matrix: Tensor, spare: Tensor, watch: Stopwatch) -> float:
    """Times an update as `training_overheads` does, but with what it takes a GPU's host to hand its
    many small kernels over.
    """
    assert matrix.grad is not None
    watch.clear()
    start = watch.mark()
    matrix.grad.div_(2)
    matrix.data.copy_(spare)
    optimizer.step()
    return watch.seconds(start, watch.mark())
