"""Measures the memory that each node saves for backward passes, and what its own one needs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipedream.capture.captured import Captured
from pipedream.capture.fake_tensors import run_nodes
from pipedream.capture.node_modules import NodeModule
from pipedream.graph.profile import Footprint

_MARK = "pipedream backward of "


def footprints(
    captured: Captured, inputs: Sequence[Tensor], device: torch.device, meta: bool = False
) -> dict[str, Footprint]:
    """Runs `captured` once, node by node, each followed by its backward pass: see `run_nodes`.

    `inputs` are in the order of `captured.inputs`. Buffers are restored.
    """
    with torch.enable_grad(), metered(device) as meter:
        values = captured.on_device(inputs, device)
        memory = SavedMemory(captured, {} if meta else values, meter)
        run_nodes(captured, values, device, memory.run_node, meta)
    return memory.footprints()


class MemoryOwners:
    """`first` maps a value to the one whose memory it shares, such as a view to its base."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        """`inputs` of the model, by name."""
        owner = {address(value): name for name, value in inputs.items()}
        self.first = {name: owner[address(value)] for name, value in inputs.items()}

    def of_node(
        self, node: NodeModule, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> dict[int, str]:
        """Returns by address the values that own the memory of what the node reads and gives."""
        names: dict[int, str] = {}
        for name, tensor in zip(node.segment.inputs, inputs, strict=True):
            self.first[name] = names.setdefault(address(tensor), self.first.get(name, name))
        for name, tensor in zip(node.segment.outputs, outputs, strict=True):
            self.first[name] = names.setdefault(address(tensor), name)
        return names


class SavedMemory:
    """Counts saved bytes, each value once, in the node that computes it."""

    def __init__(self, captured: Captured, inputs: Mapping[str, Tensor], meter: Meter) -> None:
        self.captured, self.meter = captured, meter
        self.saved: Counter[str] = Counter()
        self.counted: set[str] = set()
        self.owners = MemoryOwners(inputs)

    def run_node(self, node: NodeModule, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Runs a node on its inputs among `values` and returns its outputs."""
        inputs, module = node.inputs(values), node.segment.module
        with saving() as packed:
            outputs = module(*inputs)
        parameter_addresses = set(map(address, (*module.parameters(), *module.buffers())))
        names = self.owners.of_node(node, inputs, outputs)
        for place, size in packed.items():
            known = names.get(place)
            if place not in parameter_addresses and known not in self.counted:
                self.saved[self.captured.values[known].node if known else node.name] += size
                self.counted |= {known} if known else set()
        ends, wanted = node.ends(inputs, outputs)
        if ends and wanted:
            with self.meter.over(node.name):
                gradients = [torch.ones_like(value) for value in ends]
                torch.autograd.grad(ends, wanted, gradients, allow_unused=True)
        return [value.detach() for value in outputs]

    def footprints(self) -> dict[str, Footprint]:
        """Returns the footprints by node; call it after leaving the context of `metered`."""
        peaks = self.meter.peaks()
        nodes = self.captured.graph.nodes
        return {node: Footprint(self.saved[node], peaks.get(node, 0)) for node in nodes}


class Meter:
    """The peak of allocated memory during the backward pass of each node, above its start.

    Uses torch's profiler, since the CPU allocator has no statistics.
    """

    def __init__(self) -> None:
        self.trace = torch.autograd.profiler.profile(profile_memory=True)

    @contextmanager
    def over(self, node: str) -> Iterator[None]:
        """Measures what runs inside, the backward pass of `node`."""
        with torch.autograd.profiler.record_function(_MARK + node):
            yield

    def peaks(self) -> Mapping[str, int]:
        """Returns the bytes by node; call it after leaving the context of `metered`."""
        result = self.trace.kineto_results
        assert result is not None
        peaks: dict[str, int] = {}
        node, end, allocated = "", -1, 0
        for event in sorted(result.events(), key=lambda event: event.start_ns()):
            if event.name().startswith(_MARK):
                node, end, allocated = event.name().removeprefix(_MARK), event.end_ns(), 0
                peaks[node] = 0
            elif event.name() == "[memory]" and event.start_ns() <= end:
                allocated += event.nbytes()  # type: ignore[attr-defined]
                peaks[node] = max(peaks[node], allocated)
        return peaks


class _CudaMeter(Meter):
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.measured: dict[str, int] = {}

    @contextmanager
    def over(self, node: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        self.measured[node] = torch.cuda.max_memory_allocated(self.device) - before

    def peaks(self) -> Mapping[str, int]:
        return self.measured


@contextmanager
def metered(device: torch.device) -> Iterator[Meter]:
    if device.type == "cuda":
        yield _CudaMeter(device)
        return
    meter = Meter()
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


@contextmanager
def saving() -> Iterator[dict[int, int]]:
    """Yields the bytes of what is saved inside for a backward pass, by address."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def address(tensor: Tensor) -> int:
    """Returns the address of the storage of a tensor or view."""
    return tensor.untyped_storage().data_ptr()
