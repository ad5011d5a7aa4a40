"""Steps of the optimizer and sums of gradients, which pass over memory as fast as it goes."""

from __future__ import annotations

import math

from torch import Tensor

from pipedream.capture.captured import Captured
from pipedream.profiler.estimate.roofline import Roofline
from pipedream.profiler.estimate.work import Work, product_work
from pipedream.profiler.timing.muon_steps import hidden_matrices, newton_schulz_products
from pipedream.profiler.timing.training_overheads import MUON, UpdateCost, trainable

_STATE = {"sgd": 0, "momentum": 1, "adam": 2}
"""Tensors that an optimizer keeps for each parameter."""
_BASE, _COPY = 7, 2
"""Times that the bytes of a parameter pass: mean of its gradient 2, copy of the old version 2, step
3; two more for each tensor of state."""
_SUM = 3
"""Of its gradient: two are read, one is written."""


def updates(captured: Captured, roofline: Roofline) -> dict[str, UpdateCost]:
    """Returns the cost of each optimizer, as `training_overheads.updates` measures it."""
    learned = trainable(captured)
    size = sum(value.nbytes for value in learned.values())
    if not size:
        return {}
    costs = {
        kind: UpdateCost(
            size / _passing(roofline, traffic(kind) * size, kind),
            {name: state * value.nbytes for name, value in learned.items()},
            in_place_bytes_per_second=size
            / _passing(roofline, (traffic(kind) - _COPY) * size, kind),
        )
        for kind, state in _STATE.items()
    }
    matrices = hidden_matrices(captured, learned)
    if matrices:
        own = {name: _muon_seconds(each, roofline) for name, each in matrices.items()}
        costs[MUON] = costs["adam"].of_muon(learned, own)
    return costs


def _muon_seconds(matrix: Tensor, roofline: Roofline) -> float:
    """Those of a step with momentum, and the products of Newton-Schulz in bfloat16."""
    passing = _passing(roofline, traffic("momentum") * matrix.nbytes, "momentum")
    products = (product_work(*sizes) for sizes in newton_schulz_products(matrix.shape))
    launch = roofline.device.launch
    return passing + sum(max(roofline.of_work(each), launch) for each in products)


def gradient_sum_rate(captured: Captured, roofline: Roofline) -> float | None:
    """Returns the bytes of gradients per second that are added to earlier ones; None without."""
    size = sum(value.nbytes for value in trainable(captured).values())
    return size / _passing(roofline, traffic("sum") * size, "sum") if size else None


def traffic(kind: str) -> int:
    """Returns how many times the bytes of a parameter pass in a step of an optimizer but Muon."""
    return _SUM if kind == "sum" else _BASE + 2 * _STATE[kind]


def _passing(roofline: Roofline, moved: float, kind: str) -> float:
    """Returns the seconds of passing over so many bytes."""
    part = roofline.device.updates.get(kind)
    if part is not None:
        return moved / (roofline.device.bandwidth * part)
    return roofline.of_work(Work("pass", "pass", "float32", 0.0, moved, (math.log2(moved),)))
