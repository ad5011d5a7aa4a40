"""What each node of a captured model keeps for its backward pass, and what that pass needs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipedream.capture.export import Captured
from pipedream.capture.node_modules import NodeModule, node_modules, preserve_model_state
from pipedream.graph.profile import Footprint

_MARK = "pipedream backward of "


def footprints(
    captured: Captured, inputs: Sequence[Tensor], device: torch.device
) -> dict[str, Footprint]:
    """Walks once through `captured`, node by node, each followed by its backward pass.

    `inputs` as `captured.inputs`. Buffers are left as they were.
    """
    with preserve_model_state(captured), torch.enable_grad(), metered(device) as meter:
        memory = _SavedMemory(captured)
        memory.run(node_modules(captured, device), [value.to(device) for value in inputs], meter)
    peaks = meter.peaks()
    return {
        node: Footprint(memory.saved[node], peaks.get(node, 0)) for node in captured.graph.nodes
    }


class _SavedMemory:
    """Books every saved storage on the node that made it.

    A storage is known by its address while a value that is still awaited lies in it; afterwards it
    is forgotten, since its memory may be given out again.
    """

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.saved: Counter[str] = Counter()
        self.maker: dict[int, str] = {}
        self.booked: set[int] = set()

    def run(self, modules: Sequence[NodeModule], inputs: Sequence[Tensor], meter: Meter) -> None:
        values = dict(zip(self.captured.inputs, inputs, strict=True))
        for name, value in values.items():
            self.maker[address(value)] = self.captured.values[name].node
        left = Counter(name for node in modules for name in node.segment.inputs)
        for node in modules:
            outputs = self._step(node, values, meter)
            values.update(zip(node.segment.outputs, outputs, strict=True))
            for name in node.segment.inputs:
                left[name] -= 1
                if not left[name]:
                    del values[name]
            self._forget(values.values())

    def _step(self, node: NodeModule, values: Mapping[str, Tensor], meter: Meter) -> list[Tensor]:
        own = {address(tensor) for tensor in node.held}
        packed: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            packed.setdefault(address(tensor), tensor.detach())
            return tensor

        given = node.inputs(values)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = node.segment.module(*given)
        for place, tensor in packed.items():
            if place not in own and place not in self.booked:
                self.saved[self.maker.get(place, node.name)] += tensor.untyped_storage().nbytes()
                self.booked.add(place)
        for output in outputs:
            self.maker.setdefault(address(output), node.name)
        packed.clear()
        begin, wanted = node.ends(given, outputs)
        if begin and wanted:
            with meter.over(node.name):
                gradients = [torch.ones_like(value) for value in begin]
                torch.autograd.grad(begin, wanted, gradients, allow_unused=True)
        return [value.detach() for value in outputs]

    def _forget(self, alive: Iterable[Tensor]) -> None:
        addresses = {address(value) for value in alive}
        self.maker = {a: node for a, node in self.maker.items() if a in addresses}
        self.booked &= addresses


def address(tensor: Tensor) -> int:
    """Of the memory that it lies in, whichever part of it."""
    return tensor.untyped_storage().data_ptr()


class Meter:
    """The most memory allocated at once within each stretch of work, above its beginning."""

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
    """The CPU's allocator keeps no books: torch's profiler notes what it gives and takes."""

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
        node, end, held = "", -1, 0
        for event in events:
            if event.name().startswith(_MARK):
                node, end, held = event.name().removeprefix(_MARK), event.end_ns(), 0
                self._peaks[node] = 0
            elif event.name() == "[memory]" and event.start_ns() <= end:
                held += event.nbytes()  # type: ignore[attr-defined]
                self._peaks[node] = max(self._peaks[node], held)
        return self._peaks


@contextmanager
def metered(device: torch.device) -> Iterator[Meter]:
    if device.type == "cuda":
        yield _CudaMeter(device)
        return
    meter = _CpuMeter()
    with _silence(), meter.trace:
        yield meter


@contextmanager
def _silence() -> Iterator[None]:
    """torch's profiler says on the standard error of the process that it starts and stops."""
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
