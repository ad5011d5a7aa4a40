"""How long each node takes by itself, where the whole model does not fit: node by node."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pipedream.profiler.capture import Captured
from pipedream.profiler.fit import Fit
from pipedream.profiler.noise import Noise
from pipedream.profiler.pieces import Piece, pieces, pieces_kept
from pipedream.profiler.segment import Segment
from pipedream.profiler.stopwatch import Stopwatch, stopwatch
from pipedream.profiler.times import Times
from pipedream.profiler.timing import Patience, Repeats, Spread, Timing, no_garbage_collection


def time_one_by_one(
    captured: Captured,
    inputs: Sequence[Tensor],
    patience: Patience,
    device: torch.device,
    progress: Callable[[float], None] = lambda part: None,
) -> Times:
    """Times every node of `captured` on the values that `inputs` (as `captured.inputs`) give it.

    The model is walked through again and again, each node forward and at once backward, so that a
    busy moment of the machine hits one repeat of many nodes instead of all repeats of one; of the
    values there are only those that are still to be read. They are the model's own: an embedding
    looks up real tokens. Inputs take no time. `progress` hears how much is done, from 0 to 1.
    Buffers are left as they were.
    """
    turns: list[Mapping[str, tuple[float, float]]] = []
    repeats = Repeats(patience)
    with pieces_kept(captured), no_garbage_collection(), torch.enable_grad():
        walk = _Walk(captured, inputs, device)
        while repeats.warm(_sum(walk.run())):
            pass
        more = True
        while more:
            turns.append(walk.run())
            more = repeats.go_on(_sum(turns[-1]))
            progress(repeats.part)
    none = (0.0, 0.0)
    nodes = {
        node: Timing(
            Spread.of([turn.get(node, none)[0] for turn in turns]),
            Spread.of([turn.get(node, none)[1] for turn in turns]),
        )
        for node in captured.graph.nodes
    }
    fit = Fit()
    return Times(nodes, None, (), fit, fit, len(repeats.warming), len(repeats.noted))


def _sum(turn: Mapping[str, tuple[float, float]]) -> float:
    return sum(forward + backward for forward, backward in turn.values())


_Marks = tuple[tuple[Any, Any], tuple[Any, Any]]  # start and end, forward and backward


class _Walk:
    """The model node by node, each followed at once by its backward pass."""

    def __init__(self, captured: Captured, inputs: Sequence[Tensor], device: torch.device) -> None:
        self.captured = captured
        self.watch: Stopwatch[Any] = stopwatch(device)
        self.inputs = [value.to(device) for value in inputs]
        self.pieces = pieces(captured, device)
        self.readers = Counter(name for piece in self.pieces for name in piece.segment.inputs)
        self.noise = Noise(device)
        self.nothing = _nothing()
        self.scalar = torch.ones(1, device=device)

    def run(self) -> dict[str, tuple[float, float]]:
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


def _nothing() -> Piece:
    """A piece of no node: what it takes is not the model's, yet every node's time contains it."""
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    part = Segment(fx.GraphModule({}, graph), ("x",), ("x",))
    return Piece("", part, (True,), ())
