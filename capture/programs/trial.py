"""Whether an operator can be divided so: it is run whole, and in the parts of each device.

What devices compute is put together as EasyDist does (MetaIR, section on combinators): they have
the same, or gather it along a dimension, or add it up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from pipedream.capture.programs.description import dtype_of, execute
from pipedream.graph.placements.operators import Operator, TensorType
from pipedream.graph.placements.placement import Mesh, Partial, Placement, Replicate, Shard
from pipedream.graph.placements.regions import split
from pipedream.sharding.rules import local_operator
from pipedream.sharding.rules.strategy import Strategy

_CLOSE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_CLOSE_OTHERWISE = 5e-2
"""By type: how far results may differ, in parts of the largest number of the whole result."""

Results = Sequence[Tensor | None]

_FEW = 8
"""Of each dimension, compared before all others."""


class CannotTry(Exception):
    """Says in one line why an operator cannot be run by itself, or not twice with equal results."""


@lru_cache(maxsize=4096)
def can_be_divided(operator: Operator, strategies: tuple[Strategy, ...], mesh: Mesh) -> bool:
    """Tells whether an operator, on random inputs of its sizes, gives the same when it is divided
    so: on the first axis, and on each further one what the first device then has.
    """
    for strategy, devices in zip(strategies, mesh, strict=True):
        try:
            if not Trial(operator, seed=0).gives(strategy, devices):
                return False
        except CannotTry:
            return False
        operator = local_operator(operator, strategy, devices, 0)
    return True


class Trial:
    """An operator with random inputs, and what it computes of them; in float64 where it can be.

    Raises CannotTry.
    """

    def __init__(self, operator: Operator, seed: int) -> None:
        self.operator, self.random = operator, torch.Generator().manual_seed(seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.inputs, self.expected = self._run(seed)
        self.errors = [0.0 if whole is None else _error(whole) for whole in self.expected]

    def outputs(self, strategy: Strategy, devices: int) -> tuple[Placement | None, ...] | None:
        """Returns how so many devices have each output if their inputs are placed as the strategy
        says; None for one that is in no placement, or all of them if a device cannot do it. The
        strategy's outputs say which arguments are sizes, no more.
        """
        inputs = [
            self._held(tensor, placement, devices)
            for tensor, placement in zip(self.inputs, strategy.inputs, strict=True)
        ]
        by_device = []
        for index in range(devices):
            local = local_operator(self.operator, strategy, devices, index)
            if not _shapes_fit(local):
                return None
            try:
                by_device.append(self._execute(local, [each[index] for each in inputs]))
            except CannotTry:
                return None
        parts = zip(*by_device, strict=True)
        return tuple(
            Replicate()
            if whole is None
            else _placement([x for x in own if x is not None], whole, error)
            for own, whole, error in zip(parts, self.expected, self.errors, strict=True)
        )

    def gives(self, strategy: Strategy, devices: int) -> bool:
        """Tells whether so many devices, divided so, have all outputs as the strategy says."""
        found, types = self.outputs(strategy, devices), self.operator.outputs
        return found is not None and all(
            type_ is None or own == wanted
            for type_, own, wanted in zip(types, found, strategy.outputs, strict=True)
        )

    def _run(self, seed: int) -> tuple[list[Tensor], Results]:
        try:
            inputs = self._draw_all(seed, double=True)
            first = self._execute(self.operator, inputs)
        except CannotTry:
            inputs = self._draw_all(seed, double=False)
            first = self._execute(self.operator, inputs)
        again = self._execute(self.operator, inputs)
        pairs = zip(first, again, strict=True)
        if any(x is not None and (y is None or not _same(x, y, _error(y))) for x, y in pairs):
            raise CannotTry("it gives something else each time")
        if any(x is not None and x.numel() and not x.isfinite().any() for x in first):
            raise CannotTry("it gives no numbers for random inputs")
        return inputs, first

    def _draw_all(self, seed: int, double: bool) -> list[Tensor]:
        return [self._draw(type_, double, seed) for type_ in self.operator.inputs]

    def _execute(self, operator: Operator, inputs: Sequence[Tensor]) -> Results:
        # Whatever the operator raises: it may want certain sizes, types or values.
        try:
            with torch.no_grad():
                results = execute(operator, [each.clone() for each in inputs])
        except Exception as error:
            said = next(iter(str(error).strip().splitlines()), "")
            raise CannotTry(f"{type(error).__name__}: {said}"[:200]) from error
        wanted = operator.outputs
        if len(results) < len(wanted):  # as of a split whose sizes are divided as well
            raise CannotTry(f"it gives {len(results)} of {len(wanted)} outputs")
        return [None if type_ is None else x for x, type_ in zip(results, wanted, strict=False)]

    def _draw(self, type_: TensorType, double: bool, seed: int) -> Tensor:
        """Numbers of both signs, or from 0 to 1 with odd seeds; 0 or 1 for integers, which are
        valid indices.
        """
        dtype = dtype_of(type_)
        if not (dtype.is_floating_point or dtype.is_complex):
            drawn = torch.randint(0, 2, type_.shape, generator=self.random)
            return drawn.to(dtype).to(self.device)
        if double:
            dtype = torch.complex128 if dtype.is_complex else torch.float64
        draw = torch.rand if seed % 2 else torch.randn
        wide = torch.complex128 if dtype.is_complex and not seed % 2 else torch.float64
        return draw(type_.shape, generator=self.random, dtype=wide).to(dtype).to(self.device)

    def _held(self, tensor: Tensor, placement: Placement, devices: int) -> Sequence[Tensor]:
        """Returns what each device has; of a partial tensor random terms."""
        if isinstance(placement, Shard):
            return list(_cut(tensor, placement.dim, devices))
        if placement == Partial():
            terms = [
                torch.randn(tensor.shape, generator=self.random, dtype=torch.float64)
                .to(tensor.dtype)
                .to(tensor.device)
                for _ in range(devices - 1)
            ]
            return [*terms, tensor - torch.stack(terms).sum(0)]
        return [tensor] * devices


def _shapes_fit(operator: Operator) -> bool:
    """Tells whether the operator takes tensors of such shapes. Some kernels end the process where
    it does not; one that knows no tensors without memory is to be tried.
    """
    inputs = [
        torch.empty(each.shape, dtype=dtype_of(each), device="meta") for each in operator.inputs
    ]
    try:
        with torch.no_grad():
            execute(operator, inputs)
    except NotImplementedError:
        return True
    except Exception:  # whatever an operator raises of shapes that it does not take
        return False
    return True


def _placement(parts: Sequence[Tensor], whole: Tensor, error: float) -> Placement | None:
    """Returns how devices that hold these parts have the whole tensor, each element of which they
    may miss by the error.
    """
    if all(_same(part, whole, error) for part in parts):
        return Replicate()
    for dim, size in enumerate(whole.shape):
        if size >= len(parts):
            cut = _cut(whole, dim, len(parts))
            if all(_same(part, own, error) for part, own in zip(parts, cut, strict=True)):
                return Shard(dim)
    if any(part.shape != whole.shape for part in parts) or not whole.is_floating_point():
        return None
    return Partial() if _same(torch.stack(list(parts)).sum(0), whole, error) else None


def _cut(tensor: Tensor, dim: int, devices: int) -> Iterator[Tensor]:
    """Yields what each device has, as views."""
    for index in range(devices):
        begin, end = split(tensor.shape[dim], devices, index)
        yield tensor.narrow(dim, begin, end - begin)


def _error(tensor: Tensor) -> float:
    """Returns by how much what equals it may miss its elements."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    finite = tensor[tensor.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return _CLOSE.get(tensor.dtype, _CLOSE_OTHERWISE) * largest


def _same(one: Tensor, other: Tensor, error: float) -> bool:
    """Tells whether no element misses the other's. Most tensors differ in their first elements."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    few = (slice(_FEW),) * one.dim()
    return all(
        torch.allclose(a, b, rtol=0.0, atol=error, equal_nan=True)
        for a, b in ((one[few], other[few]), (one, other))
    )
