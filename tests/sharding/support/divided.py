"""Operators executed in parts: whether what the devices compute is what the whole operator does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Barrier
from typing import Any
from unittest.mock import patch

import torch
from joint_models import Traced
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream.capture.programs.batch_norms import DividedBatchNorm
from pipedream.capture.programs.description import describe_operator, execute, value_name
from pipedream.graph.placements.operators import Operator, TensorType
from pipedream.graph.placements.placement import (
    Mesh,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    coordinates,
    device_count,
)
from pipedream.graph.placements.regions import Region, blocks, held_region
from pipedream.sharding.assignment import Assignment
from pipedream.sharding.rules import RULES, local_operator, strategies
from pipedream.sharding.rules.strategy import DivisionRule, Strategy

DRAWS = ("aten.bernoulli", "aten.rand", "aten.empty", "aten.new_empty", "aten.dropout")
"""What these compute cannot be repeated, or is nothing."""
_NEW = torch.Generator().manual_seed(3)


@dataclass(frozen=True)
class Executed:
    """An operator and tensors to execute it on."""

    operator: Operator
    inputs: tuple[Tensor, ...]


def executed_by(call: Callable[[], Any]) -> list[Executed]:
    """All operators that a function executes, autograd's among them."""
    with _Recorded() as recorded:
        call()
    return _distinct(recorded.found)


def executed_in(traced: Traced) -> list[Executed]:
    """All operators of a joint graph."""
    with _Recorded() as recorded:
        interpreter = fx.Interpreter(traced.joint.module)
        placeholders = traced.joint.module.graph.find_nodes(op="placeholder")
        interpreter.run(*(traced.values[node] for node in placeholders))
    return _distinct(recorded.found)


def wrong_strategies(
    case: Executed,
    devices: int,
    chunks: tuple[int, ...] = (2, 3),
    rule: DivisionRule | None = None,
    close: float | None = None,
) -> Iterator[tuple[Strategy, str]]:
    """The strategies that do not compute what the operator does, and why.

    By the rule of the table, if no other is given. `close`: the relative difference that is
    rounding, of the type of the inputs if none is given.
    """
    expected = _run(case.operator, case.inputs)
    with patch.dict(RULES, {} if rule is None else {case.operator.family: rule}):
        for strategy in strategies.__wrapped__(case.operator, devices, chunks):
            why = _difference(case, strategy, devices, expected, close)
            if why:
                yield strategy, why


def _run(operator: Operator, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    own = [tensor.clone() for tensor in inputs]
    return _results(operator, execute(operator, own), own)


def _results(
    operator: Operator, outputs: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """The outputs, and after them the inputs that it changes."""
    computed = [
        None if wanted is None else output
        for output, wanted in zip(outputs, operator.outputs, strict=False)
    ]
    return [*computed, *(inputs[number] for number in operator.writes)]


def execute_divided(
    whole: Operator,
    locals_: Sequence[Operator],
    strategies: Sequence[Strategy],
    mesh: Mesh,
    inputs: Sequence[Sequence[Tensor]],
    seed: int = 0,
) -> list[tuple[Tensor | None, ...]]:
    """The outputs of the local operator of each device, in threads if they add up within it. All
    draw random numbers after the same seed.
    """
    axes = [axis for axis, each in enumerate(strategies) if each.within == Partial()]
    if not axes:
        seeded = (torch.manual_seed(seed) for _ in locals_)
        triples = zip(seeded, locals_, inputs, strict=True)
        return [execute(local, own) for _, local, own in triples]
    meeting = _Meeting(mesh, axes)
    runs = [
        DividedBatchNorm(whole, local, partial(meeting.add_up, device))
        for device, local in enumerate(locals_)
    ]
    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(lambda run, own: run(*own), runs, inputs))


class _Meeting:
    """Devices of a mesh, each in a thread, that add up over some axes at the same time."""

    def __init__(self, mesh: Mesh, axes: Sequence[int]) -> None:
        self.mesh, self.axes = mesh, axes
        self.barrier = Barrier(device_count(mesh), timeout=30)
        self.terms: dict[int, Tensor] = {}

    def add_up(self, device: int, number: int, term: Tensor) -> Tensor:
        self.terms[device] = term
        self.barrier.wait()
        total = sum(self.terms[k] for k in sorted(self.terms) if self._meet(k, device))
        self.barrier.wait()
        assert isinstance(total, Tensor)
        return total

    def _meet(self, one: int, other: int) -> bool:
        """Whether two devices differ on these axes alone."""
        places = zip(coordinates(self.mesh, one), coordinates(self.mesh, other), strict=True)
        return all(axis in self.axes or a == b for axis, (a, b) in enumerate(places))


def _difference(
    case: Executed,
    strategy: Strategy,
    devices: int,
    expected: Sequence[Tensor | None],
    close: float | None,
) -> str:
    operator = case.operator
    by_device = [
        held(tensor, placement, devices)
        for tensor, placement in zip(case.inputs, strategy.inputs, strict=True)
    ]
    locals_ = [local_operator(operator, strategy, devices, index) for index in range(devices)]
    inputs = [[each[index].clone() for each in by_device] for index in range(devices)]
    for index, local in enumerate(locals_):
        if _shapes(local.inputs) != [x.shape for x in inputs[index]]:
            return f"device {index} is to have {_shapes(local.inputs)}"
    try:
        executed = execute_divided(operator, locals_, (strategy,), (devices,), inputs)
    except (RuntimeError, IndexError) as error:
        return str(error)
    results = [_results(operator, *each) for each in zip(executed, inputs, strict=True)]
    for index, local in enumerate(locals_):
        outputs = results[index][: len(operator.outputs)]
        if _shapes(local.outputs) != [None if x is None else x.shape for x in outputs]:
            return f"device {index} has {[None if x is None else x.shape for x in outputs]}"
    if close is None:
        close = 1e-6 if any(each.dtype == "float32" for each in operator.inputs) else 1e-12
    placements = [*strategy.outputs, *(strategy.inputs[number] for number in operator.writes)]
    for number, (whole, placement) in enumerate(zip(expected, placements, strict=True)):
        is_state = whole is not None and not whole.dim() and "attention" in operator.family
        # Of random numbers: a kernel hands on where these would be, though none are drawn.
        if whole is not None and not is_state and not operator.family.startswith(DRAWS):
            parts = [result[number] for result in results]
            if not _agree(parts, whole, placement, close):
                return f"output {number} differs"
    return ""


def _agree(
    parts: Sequence[Tensor | None], whole: Tensor, placement: Placement, close: float
) -> bool:
    found = [part for part in parts if part is not None]
    if len(found) != len(parts):
        return False
    expected = [whole] * len(parts)
    if placement == Partial():
        found, expected = [torch.stack(found).sum(0).to(whole.dtype)], [whole]
    elif isinstance(placement, Shard):
        expected = _cut(whole, placement, len(parts))
    return all(_close(one, other, close) for one, other in zip(found, expected, strict=True))


def _close(one: Tensor, other: Tensor, close: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return bool((one == other).all())
    scale = other[other.isfinite()].abs().max().item() if other.isfinite().any() else 1.0
    return torch.allclose(one, other, rtol=0, atol=close * max(1.0, scale), equal_nan=True)


def held(tensor: Tensor, placement: Placement, devices: int) -> list[Tensor]:
    """What each device has; of a partial tensor random terms."""
    if isinstance(placement, Shard):
        return _cut(tensor, placement, devices)
    if placement == Partial():
        terms = [_random_like(tensor) for _ in range(devices - 1)]
        return [*terms, tensor - sum(terms)]
    return [tensor] * devices


def _cut(tensor: Tensor, placement: Shard, devices: int) -> list[Tensor]:
    chunks = torch.tensor_split(tensor, placement.chunks, placement.dim)
    parts = [torch.tensor_split(chunk, devices, placement.dim) for chunk in chunks]
    return [
        torch.cat([chunk[index] for chunk in parts], placement.dim).contiguous()
        for index in range(devices)
    ]


def _random_like(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=_NEW, dtype=tensor.dtype)
    return torch.randint(-9, 9, tensor.shape, generator=_NEW, dtype=tensor.dtype)


def _shapes(types: Sequence[TensorType | None]) -> list[tuple[int, ...] | None]:
    return [None if each is None else each.shape for each in types]


def _distinct(found: Sequence[Executed]) -> list[Executed]:
    return list({each.operator: each for each in found}.values())


class _Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Executed] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = [x.clone() for x in _tensors(args, kwargs or {})]
        result = func(*args, **(kwargs or {}))
        operator, sources = describe_operator(func, args, kwargs or {}, result)
        assert len(sources) == len(before)
        self.found.append(Executed(operator, tuple(before)))
        return result


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    flat = [x for each in (*args, *kwargs.values()) for x in _each(each)]
    return [x for x in flat if isinstance(x, Tensor)]


def _each(argument: Any) -> Sequence[Any]:
    return argument if isinstance(argument, tuple | list) else (argument,)


def run_divided(traced: Traced, assignment: Assignment) -> dict[str, Tensor]:
    """All values of the graph, computed by simulated devices and put together again."""
    mesh = assignment.mesh.sizes
    given = {value_name(node): tensor.clone() for node, tensor in traced.values.items()}
    held: dict[str, list[Tensor]] = {}
    for each in assignment.graph.inputs:
        if each.value in given:
            held[each.value] = _hold(given[each.value], mesh, assignment.placed[each.value])
    for number_of_call, call in enumerate(assignment.graph.calls):
        targets = assignment.targets(call.name)
        inputs = [
            _moved(held[value], call.operator.inputs[n].shape, mesh, assignment.placed[value], to)
            for n, (value, to) in enumerate(zip(call.reads, targets, strict=True))
        ]
        strategies = assignment.strategies[call.name]
        locals_, local_inputs = [], []
        for device in range(device_count(mesh)):
            local = call.operator
            for strategy, size, index in zip(
                strategies, mesh, coordinates(mesh, device), strict=True
            ):
                local = local_operator(local, strategy, size, index)
            own = [each[device] for each in inputs]
            assert _shapes(local.inputs) == [x.shape for x in own], call
            locals_.append(local)
            local_inputs.append(own)
        results = execute_divided(
            call.operator, locals_, strategies, mesh, local_inputs, number_of_call
        )
        for number, value in enumerate(call.results):
            if value is not None:
                parts = [result[number] for result in results]
                held[value] = [part for part in parts if part is not None]
    types = assignment.graph.types()
    return {
        value: _whole(parts, types[value].shape, mesh, assignment.placed[value])
        for value, parts in held.items()
    }


def _hold(whole: Tensor, mesh: Mesh, placements: Placements) -> list[Tensor]:
    """What each device has; of partial tensors the first device of the axis has all."""
    parts = []
    for device in range(device_count(mesh)):
        tensor = whole
        for placement, size, index in zip(placements, mesh, coordinates(mesh, device), strict=True):
            if isinstance(placement, Shard):
                tensor = _cut(tensor, placement, size)[index]
            elif placement == Partial() and index:
                tensor = torch.zeros_like(tensor)
        parts.append(tensor.clone())
    return parts


def _moved(
    parts: list[Tensor], shape: tuple[int, ...], mesh: Mesh, source: Placements, to: Placements
) -> list[Tensor]:
    return parts if source == to else _hold(_whole(parts, shape, mesh, source), mesh, to)


def _whole(
    parts: Sequence[Tensor], shape: tuple[int, ...], mesh: Mesh, placements: Placements
) -> Tensor:
    """Sums along partial axes; of what several devices have alike the first one's."""
    whole = torch.zeros(shape, dtype=parts[0].dtype)
    for device, part in enumerate(parts):
        pairs = zip(placements, coordinates(mesh, device), strict=True)
        if any(placement == Replicate() and index for placement, index in pairs):
            continue
        region = held_region(shape, mesh, placements, device)
        for there, here in blocks(region, Region(tuple(((0, n),) if n else () for n in shape))):
            if whole.dtype == torch.bool:
                whole[there] = part[here]
            else:
                whole[there] += part[here]
    return whole
