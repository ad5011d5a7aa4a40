"""Measures the memory that each node saves for backward passes, and what its own one needs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipedream.capture.export import Captured
from pipedream.capture.node_modules import (
    NodeModule,
    node_modules,
    preserve_model_state,
    run_in_order,
)
from pipedream.graph.profile import Footprint

_MARK = "pipedream backward of "


def footprints(
    captured: Captured, inputs: Sequence[Tensor], device: torch.device
) -> dict[str, Footprint]:
    """Runs `captured` once, node by node, each followed by its backward pass.

    `inputs` are in the order of `captured.inputs`. Buffers are restored.
    """
    with preserve_model_state(captured), torch.enable_grad(), metered(device) as meter:
        values = {n: value.to(device) for n, value in zip(captured.inputs, inputs, strict=True)}
        memory = _SavedMemory(captured, values, meter)
        run_in_order(node_modules(captured, device), values, memory.run_node)
    peaks = meter.peaks()
    return {
        node: Footprint(memory.saved[node], peaks.get(node, 0)) for node in captured.graph.nodes
    }


class _SavedMemory:
    """Counts every saved storage once, in the node that allocated it.

    A storage is identified by its address as long as a value in it is still to be read; after that
    its memory may be reused.
    """

    def __init__(self, captured: Captured, inputs: Mapping[str, Tensor], meter: Meter) -> None:
        self.saved: Counter[str] = Counter()
        self.owner = {address(value): captured.values[n].node for n, value in inputs.items()}
        self.counted: set[int] = set()
        self.meter = meter

    def run_node(self, node: NodeModule, values: Mapping[str, Tensor]) -> list[Tensor]:
        self._forget_freed(values.values())
        own = {address(tensor) for tensor in node.parameters_and_buffers}
        packed: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            packed.setdefault(address(tensor), tensor.detach())
            return tensor

        inputs = node.inputs(values)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = node.segment.module(*inputs)
        for place, tensor in packed.items():
            if place not in own and place not in self.counted:
                self.saved[self.owner.get(place, node.name)] += tensor.untyped_storage().nbytes()
                self.counted.add(place)
        for output in outputs:
            self.owner.setdefault(address(output), node.name)
        packed.clear()
        run_backward(node, inputs, outputs, self.meter)
        return [value.detach() for value in outputs]

    def _forget_freed(self, alive: Iterable[Tensor]) -> None:
        addresses = {address(value) for value in alive}
        self.owner = {a: node for a, node in self.owner.items() if a in addresses}
        self.counted &= addresses


def run_backward(
    node: NodeModule, inputs: Sequence[Tensor], outputs: Sequence[Tensor], meter: Meter
) -> None:
    """Runs the backward pass of a node under the meter, if it has one."""
    ends, wanted = node.ends(inputs, outputs)
    if ends and wanted:
        with meter.over(node.name):
            gradients = [torch.ones_like(value) for value in ends]
            torch.autograd.grad(ends, wanted, gradients, allow_unused=True)


def address(tensor: Tensor) -> int:
    """The address of the storage of a tensor or view."""
    return tensor.untyped_storage().data_ptr()


class Meter:
    """The peak of allocated memory during the backward pass of each node, above its start."""

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}

    @contextmanager
    def over(self, node: str) -> Iterator[None]:
        raise NotImplementedError

    def peaks(self) -> Mapping[str, int]:
        return self._peaks


class _CudaMeter(Meter):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    @contextmanager
    def over(self, node: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        self._peaks[node] = torch.cuda.max_memory_allocated(self.device) - before


class _CpuMeter(Meter):
    """Uses torch's profiler, since the CPU allocator has no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = torch.autograd.profiler.profile(profile_memory=True)

    @contextmanager
    def over(self, node: str) -> Iterator[None]:
        with torch.autograd.profiler.record_function(_MARK + node):
            yield

    def peaks(self) -> Mapping[str, int]:
        result = self.trace.kineto_results
        assert result is not None
        events = sorted(result.events(), key=lambda event: event.start_ns())
        node, end, allocated = "", -1, 0
        for event in events:
            if event.name().startswith(_MARK):
                node, end, allocated = event.name().removeprefix(_MARK), event.end_ns(), 0
                self._peaks[node] = 0
            elif event.name() == "[memory]" and event.start_ns() <= end:
                allocated += event.nbytes()  # type: ignore[attr-defined]
                self._peaks[node] = max(self._peaks[node], allocated)
        return self._peaks


@contextmanager
def metered(device: torch.device) -> Iterator[Meter]:
    if device.type == "cuda":
        yield _CudaMeter(device)
        return
    meter = _CpuMeter()
    with _discard_stderr(), meter.trace:
        yield meter


@contextmanager
def _discard_stderr() -> Iterator[None]:
    """Discards stderr of the process, where torch's profiler reports its start and stop."""
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
