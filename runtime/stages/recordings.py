"""Passes of a stage that a GPU does again as they were recorded: CUDA graphs.

A recording has one call for all kernels of a pass, where launching each takes the host longer than
the GPU needs for small ones. It reads and writes the same memory each time. So each microbatch in
flight takes a `Slot` with recordings and memory of its own; what others need is copied into it and
out of it. The weights are read where they are, which must not change: no schedule that keeps older
versions of them can use this.

Recording waits for the GPU, and gives it memory: it is done while nothing else is under way, before
ranks meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx

from pipedream.capture.programs.program import Kept, Program
from pipedream.comm.device.copies import copy_all
from pipedream.graph.errors import UserError

T = TypeVar("T")

_DIGITS = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Relative difference between a recording and a pass; kernels may add up in another order. Of types
with fewer digits 5 %."""


class Recorder(Protocol):
    """Records what `run` gives the device; returns what does it again, and what `run` returns."""

    def __call__(self, run: Callable[[], T]) -> tuple[Callable[[], Any], T]: ...


class CudaRecorder:
    """Records CUDA graphs that use the same memory, one after the other."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], T]) -> tuple[Callable[[], Any], T]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the rank may use the GPU meanwhile, as those that read data do.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            results = run()
        return graph.replay, results


@dataclass
class Slot:
    """The passes of one microbatch at a time, in memory of their own."""

    program: Program
    state: Mapping[str, Tensor]
    inputs: Sequence[Tensor]
    drawn: Sequence[Tensor]
    tangents: Sequence[Tensor]

    def record(self, recorder: Recorder) -> None:
        """Records the passes, which have been done before: else kernels would be loaded here."""
        program = self.program
        self.forward, (self.outputs, self.saved) = recorder(
            lambda: program.forward(self.state, self.inputs, self.drawn)
        )
        self.backward, (self.of_inputs, self.kept) = recorder(
            lambda: program.backward(dict(self.saved), self.tangents)
        )
        kept = Kept(dict(self.kept.values), self.kept.without)
        self.weights, self.gradients = recorder(lambda: list(program.weight_gradients(kept)))


@dataclass
class Recordings:
    """Those of a stage, for `count` microbatches in flight. `wanted`: until they are made."""

    count: int
    slots: list[Slot] = field(default_factory=list)
    free: list[Slot] = field(default_factory=list)
    addresses: tuple[int, ...] = ()
    wanted: bool = True

    def record(
        self, program: Program, state: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> None:
        """Records the passes with such inputs, and compares the recordings with the passes. Raises
        UserError.
        """
        self.wanted = False
        drawn = program.draw()
        tangents = [_made_up(_like(node)) for node in program.joint.tangents]
        inputs = [
            _made_up(_like(node).copy_(given))
            for node, given in zip(program.joint.inputs, inputs, strict=True)
        ]
        try:
            with _unchanged(state):
                for _ in range(self.count):
                    known = (
                        [each.clone() for each in given] for given in (inputs, drawn, tangents)
                    )
                    slot = Slot(program, state, *known)
                    slot.record(CudaRecorder())
                    self.slots.append(slot)
            same = all(map(_computes_the_same, self.slots))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(refused(f"this model cannot be recorded: {reason}")) from error
        if not same:
            raise UserError(refused("recorded passes compute something else than passes do"))
        self.free, self.addresses = list(self.slots), _addresses(state)

    def take(self, state: Mapping[str, Tensor]) -> Slot | None:
        """Returns one that no microbatch has; None if there is none."""
        if not self.free:
            return None
        assert _addresses(state) == self.addresses, "weights have moved since they were recorded"
        return self.free.pop()


def refused(why: str) -> str:
    """Returns the message of an error."""
    return f"cuda_graphs: {why}: remove it from the run config"


def _computes_the_same(slot: Slot) -> bool:
    """Does the passes and the recordings with what the slot has."""
    program = slot.program
    with _unchanged(slot.state):
        outputs, saved = program.forward(slot.state, slot.inputs, slot.drawn)
        of_inputs, kept = program.backward(saved, slot.tangents)
        expected = [*outputs, *of_inputs, *(each for _, each in program.weight_gradients(kept))]
    with _unchanged(slot.state):
        for replay in (slot.forward, slot.backward, slot.weights):
            replay()
    found = [*slot.outputs, *slot.of_inputs, *(each for _, each in slot.gradients)]
    for one, other in zip(expected, found, strict=True):
        if one is not None and other is not None:
            digits = _DIGITS.get(one.dtype, 0.05)
            size = float(one.detach().abs().max()) if one.numel() else 0.0
            if not torch.allclose(one, other, rtol=digits, atol=digits * size, equal_nan=True):
                return False
    return True


@contextmanager
def _unchanged(state: Mapping[str, Tensor]) -> Iterator[None]:
    """Gives tensors the values they had, such as the averages of a batch norm."""
    before = [tensor.detach().clone() for tensor in state.values()]
    yield
    copy_all(zip((tensor.detach() for tensor in state.values()), before, strict=True))


def _addresses(state: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in state.values())


def _like(node: fx.Node) -> Tensor:
    """Returns memory for a value, laid out as in the trace."""
    traced: Tensor = node.meta["val"]
    return torch.empty_strided(
        traced.shape, traced.stride(), dtype=traced.dtype, device=traced.device
    )


def _made_up(tensor: Tensor) -> Tensor:
    """Fills it with small numbers: what comes from made-up messages is zeros. Integers stay."""
    return tensor.normal_(std=0.1) if tensor.is_floating_point() else tensor
