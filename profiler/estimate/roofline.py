"""Seconds of an operator on a device: the roofline (Williams et al., CACM 2009), times the part of
it that work like this was measured to reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipedream.graph.placements.operators import Operator
from pipedream.profiler.estimate.device_file import DeviceFile
from pipedream.profiler.estimate.work import Work, work_of

_NEAREST = 5
"""Measurements that an estimate is the mean of, weighted by their distance."""
_NEAR = 1e-3
"""A squared distance, in octaves, below which a measurement counts as of this very size."""
_USUAL = 0.5
"""The part of the roofline of what is like nothing that was measured."""


class Roofline:
    """Estimates seconds on one device; the same operator is estimated once."""

    def __init__(self, device: DeviceFile) -> None:
        self.device = device
        self.known: dict[Operator, float] = {}

    def seconds(self, operator: Operator, backward: bool = False) -> float:
        """Returns the seconds of an operator in the forward or the backward pass."""
        if operator not in self.known:
            work = work_of(operator)
            self.known[operator] = 0.0 if work is None else self.of_work(work)
        own = self.known[operator]
        return max(own * self.scale(backward), self.launch(backward)) if own else 0.0

    def of_work(self, work: Work) -> float:
        """seconds = max(flops / peak, bytes / bandwidth) / efficiency"""
        return self.bound(work) / self.efficiency(work)

    def bound(self, work: Work) -> float:
        """Returns the seconds that the device cannot be faster than."""
        device = self.device
        peak = device.peak.get(work.dtype) or min(device.peak.values())
        return max(work.flops / peak, work.bytes / device.bandwidth)

    def efficiency(self, work: Work) -> float:
        """Returns the part of the roofline that work like this reaches."""
        for kind in (work.kind, work.like, "pass"):
            by_dtype = self._measured.get(kind)
            if by_dtype is None:
                continue
            sizes, logs = by_dtype.get(work.dtype) or next(iter(by_dtype.values()))
            return _nearest(sizes, logs, self._comparable(work, sizes.shape[1]))
        return _USUAL

    def launch(self, backward: bool) -> float:
        own = self.device.launch
        return (self.device.launch_backward or own) if backward else own

    def scale(self, backward: bool) -> float:
        return self.device.scale.get("backward" if backward else "forward", 1.0)

    @cached_property
    def _measured(self) -> dict[str, dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]]:
        """By kind and type: sizes [points, dimensions] and logarithms of efficiencies [points]."""
        return {
            kind: {
                dtype: (
                    np.array([point[:-1] for point in points], dtype=np.float64),
                    np.log([point[-1] for point in points]),
                )
                for dtype, points in by_dtype.items()
            }
            for kind, by_dtype in self.device.efficiency.items()
        }

    @staticmethod
    def _comparable(work: Work, dimensions: int) -> Sequence[float]:
        """Returns sizes as the measurements of another kind have them: its bytes where these have
        one, the first where they have fewer.
        """
        if len(work.sizes) == dimensions:
            return work.sizes
        if dimensions == 1:
            return (math.log2(max(work.bytes, 1.0)),)
        return (*work.sizes, *[0.0] * dimensions)[:dimensions]


def _nearest(sizes: NDArray[np.float64], logs: NDArray[np.float64], at: Sequence[float]) -> float:
    """Returns the geometric mean of the nearest measurements, weighted by inverse distance."""
    distances = ((sizes - np.asarray(at)) ** 2).sum(axis=1)
    nearest = np.argsort(distances)[:_NEAREST]
    weights = 1.0 / (distances[nearest] + _NEAR)
    return float(np.exp((weights * logs[nearest]).sum() / weights.sum()))
