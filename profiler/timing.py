"""How long each node of a captured model takes, forward and backward, on a device."""

from __future__ import annotations

import gc
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pipedream.profiler.capture import Captured
from pipedream.profiler.pieces import Piece, pieces, pieces_kept
from pipedream.profiler.segment import Segment
from pipedream.profiler.stopwatch import CpuStopwatch, CudaStopwatch, Stopwatch


@dataclass(frozen=True)
class Spread:
    """Seconds over the repeats: the median, and the quartiles below and above it."""

    median: float
    lower: float
    upper: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        if len(seconds) == 1:
            return Spread(seconds[0], seconds[0], seconds[0])
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return Spread(median, lower, upper)


@dataclass(frozen=True)
class Timing:
    """What one node takes for one minibatch; backward is zero where no gradient flows."""

    forward: Spread
    backward: Spread


def time_nodes(
    captured: Captured,
    inputs: Sequence[Tensor],
    warmup: int,
    repeats: int,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Timing]:
    """Times every node of `captured` on the values that `inputs` (as `captured.inputs`) give it.

    The model is walked through `warmup + repeats` times, node by node, so that a node finds the
    caches as in training, and a busy moment of the machine hits one repeat of many nodes instead of
    all repeats of one. Values are the model's own: an embedding looks up real tokens. Inputs take
    no time. `progress(done, total)` is called after each node of each walk. Buffers are left as
    they were.
    """
    assert warmup >= 0
    assert repeats >= 1
    with pieces_kept(captured), _no_garbage_collection(), torch.enable_grad():
        walk = _Walk(captured, inputs, device)
        total = (warmup + repeats) * len(walk.pieces)
        count = itertools.count(1)
        turns = [walk.run(lambda: progress(next(count), total)) for _ in range(warmup + repeats)][
            warmup:
        ]
    none = (0.0, 0.0)
    return {
        node: Timing(
            Spread.of([turn.get(node, none)[0] for turn in turns]),
            Spread.of([turn.get(node, none)[1] for turn in turns]),
        )
        for node in captured.graph.nodes
    }


_Marks = tuple[tuple[Any, Any], tuple[Any, Any]]  # start and end, forward and backward


class _Walk:
    """The model node by node, each followed at once by its backward pass."""

    def __init__(self, captured: Captured, inputs: Sequence[Tensor], device: torch.device) -> None:
        self.captured = captured
        self.watch: Stopwatch[Any] = (
            CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()
        )
        self.inputs = [value.to(device) for value in inputs]
        self.pieces = pieces(captured, device)
        self.readers = Counter(name for piece in self.pieces for name in piece.segment.inputs)
        self.noise = _Noise(device)
        self.nothing = _nothing()
        self.scalar = torch.ones(1, device=device)

    def run(self, progress: Callable[[], None]) -> dict[str, tuple[float, float]]:
        """Seconds forward and backward of every node in one walk."""
        values = dict(zip(self.captured.inputs, self.inputs, strict=True))
        left = self.readers.copy()
        marks: dict[str, _Marks] = {}
        floors: list[_Marks] = []
        for piece in self.pieces:
            outputs, marks[piece.node] = self._step(piece, values)
            values.update(zip(piece.segment.outputs, outputs, strict=True))
            for name in piece.segment.inputs:
                left[name] -= 1
                if not left[name]:
                    del values[name]
            floors.append(self._step(self.nothing, {"x": self.scalar})[1])
            progress()
        # Read only now: a GPU waited for after each node would idle until the next one begins.
        return self._seconds(marks, floors)

    def _seconds(
        self, marks: Mapping[str, _Marks], floors: Sequence[_Marks]
    ) -> dict[str, tuple[float, float]]:
        """Less what doing nothing takes: a stage pays that once, here it is paid at every node."""
        read = self.watch.seconds
        forward_floor = statistics.median(read(*forward) for forward, _ in floors)
        backward_floor = statistics.median(read(*backward) for _, backward in floors)
        return {
            node: (
                max(read(*forward) - forward_floor, 0.0),
                max(read(*backward) - backward_floor, 0.0),
            )
            for node, (forward, backward) in marks.items()
        }

    def _step(self, piece: Piece, values: Mapping[str, Tensor]) -> tuple[list[Tensor], _Marks]:
        inputs = piece.inputs(values)
        start = self.watch.mark()
        outputs = piece.segment.module(*inputs)
        forward = (start, self.watch.mark())
        backward = (start, start)
        given, wanted = piece.ends(inputs, outputs)
        if given and wanted:
            gradients = [self.noise.like(value) for value in given]
            start = self.watch.mark()
            torch.autograd.grad(given, wanted, gradients, allow_unused=True)
            backward = (start, self.watch.mark())
        return [value.detach() for value in outputs], (forward, backward)


class _Noise:
    """Random gradients for any output, drawn once: drawing can cost more than the node."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.drawn: dict[torch.dtype, Tensor] = defaultdict(lambda: torch.empty(0))

    def like(self, value: Tensor) -> Tensor:
        if self.drawn[value.dtype].numel() < value.numel():
            self.drawn[value.dtype] = torch.randn(
                value.numel(), dtype=value.dtype, device=self.device
            )
        noise = self.drawn[value.dtype][: value.numel()].view(value.shape)
        return torch.empty_like(value).copy_(noise)


def _nothing() -> Piece:
    """A piece of no node: what it takes is not the model's, yet every node's time contains it."""
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    part = Segment(fx.GraphModule({}, graph), ("x",), ("x",))
    return Piece("", part, (True,), ())


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """As timeit does: a collection would be booked on whichever node it falls on."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
