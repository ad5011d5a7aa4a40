"""Seconds of an operator on a device: the roofline (Williams et al., CACM 2009), times the part of
it that work like this was measured to reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipedream.graph.placements.operators import Operator
from pipedream.profiler.estimate.device_file import DeviceFile
from pipedream.profiler.estimate.work import FP8, Work, in_fp8, work_of

_NEAREST = 5
"""Measurements that an estimate is the mean of, weighted by their distance."""
_NEAR = 1e-3
"""A squared distance, in octaves, below which a measurement counts as of this very size."""
_USUAL = 0.5
"""The part of the roofline of what is like nothing that was measured."""


class Roofline:
    """Estimates seconds on one device; the same operator is estimated once. `fp8`: products of
    matrices in bfloat16 are taken to be computed in fp8, where kernels can: they reach the part of
    its peak that they reach of that of bfloat16.
    """

    def __init__(self, device: DeviceFile, fp8: bool = False) -> None:
        self.device, self.fp8 = device, fp8
        self.works: dict[Operator, Work | None] = {}
        self.known: dict[Operator, float] = {}

    def work(self, operator: Operator) -> Work | None:
        """Returns `work_of` an operator, in the type that its product is computed in."""
        if operator not in self.works:
            work = work_of(operator)
            if self.fp8 and work is not None and in_fp8(operator, work):
                work = work._replace(dtype=FP8)
            self.works[operator] = work
        return self.works[operator]

    def seconds(self, operator: Operator) -> float:
        """Returns the seconds that the device takes for an operator."""
        if operator not in self.known:
            work = self.work(operator)
            self.known[operator] = (
                0.0 if work is None else max(self.of_work(work), self.device.launch)
            )
        return self.known[operator]

    def in_passes(self, operators: Sequence[Operator], backward: bool) -> list[float]:
        """Returns the seconds of the operators of passes in one direction: what the device takes,
        or if it waits for the host, what that takes to hand them over.
        """
        of_device = [self.seconds(each) for each in operators]
        table = self.device.host_backward if backward else self.device.host
        if not table:
            return of_device
        of_host = [self._handing_over(each, table) for each in operators]
        return max(of_device, of_host, key=sum)

    def _handing_over(self, operator: Operator, table: Mapping[str, float]) -> float:
        work = self.work(operator)
        return 0.0 if work is None else table.get(work.kind, table["usual"])

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
