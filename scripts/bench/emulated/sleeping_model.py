"""A model whose layers sleep: the graph, times and sizes of a profile, without its computation.

The factories are for a run config of pd-train. Times and sizes are scaled; only these are real:
outputs have any values, and gradients are zero.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipedream.graph.model import Graph, Node, read_graph

BATCH = 2
"""Examples in a minibatch; each has half of the bytes of an activation."""
LEAST_SLEEP = 0.005
"""Seconds. Shorter ones are left to the next layer of the pass: to wake up costs a core time."""
_FLOAT = 4
"""Bytes."""


class Pace:
    """Lets the layers of a pass take their seconds together.

    What is slept too long, or spent between two layers, is taken off those that follow in the pass.
    """

    def __init__(self) -> None:
        self.begin(0, 0)

    def begin(self, first: int, last: int) -> None:
        """This process has the layers from `first` to `last`, which begin and end passes."""
        self.first, self.last, self.due = first, last, 0.0

    def take(self, number: int, seconds: float, backward: bool) -> None:
        """Sleeps until layer `number` has had its seconds, or leaves a few to the next one."""
        begins, ends = (self.last, self.first) if backward else (self.first, self.last)
        now = time.perf_counter()
        self.due = (now if number == begins else self.due) + seconds
        ahead = self.due - now
        if ahead > (0.0 if number == ends else LEAST_SLEEP):
            time.sleep(ahead)


pace = Pace()
"""That of this process."""


@torch.library.custom_op("emulated::layer", mutates_args=())
def _layer(
    inputs: list[Tensor],
    weight: Tensor | None,
    number: int,
    forward_seconds: float,
    backward_seconds: float,
    width: int,
    is_output: bool,
) -> Tensor:
    """The output [batch, width] of a layer, after its seconds; of zeros where the loss reads it."""
    make = inputs[0].new_zeros if is_output else inputs[0].new_empty
    output = make((inputs[0].shape[0], width))
    pace.take(number, forward_seconds, backward=False)
    return output


@_layer.register_fake
def _(
    inputs: list[Tensor],
    weight: Tensor | None,
    number: int,
    forward_seconds: float,
    backward_seconds: float,
    width: int,
    is_output: bool,
) -> Tensor:
    return inputs[0].new_empty((inputs[0].shape[0], width))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given, ctx.weight, ctx.number, _, ctx.seconds, _, _ = inputs
    ctx.shapes = [tensor.shape for tensor in given]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    weight = None if ctx.weight is None else torch.zeros_like(ctx.weight)
    inputs = [gradient.new_empty(shape) for shape in ctx.shapes]
    pace.take(ctx.number, ctx.seconds, backward=True)
    return inputs, weight, None, None, None, None, None


_layer.register_autograd(_gradients, setup_context=_remember)


class SleepingLayer(nn.Module):
    """A node of a graph. `number`: its place in a topological order."""

    def __init__(self, node: Node, number: int, is_output: bool) -> None:
        super().__init__()
        count = round(node.parameter_bytes / _FLOAT)
        self.weight = nn.Parameter(torch.zeros(count)) if count else None
        self.seconds = node.forward_seconds, node.backward_seconds
        self.width = max(1, round(node.output_bytes / _FLOAT / BATCH))
        self.number, self.is_output = number, is_output

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = _layer(
            list(inputs), self.weight, self.number, *self.seconds, self.width, self.is_output
        )
        return output


class SleepingModel(nn.Module):
    """The layers of a graph, called in a topological order, with [batch, 1] as the only input.

    The last one gives the output. Those that it does not depend on are left out: what they compute
    is thrown away, and as outputs of the model it would be sent to the last stage. `seconds`:
    forward and backward, of each layer.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        output = graph.order[-1]
        needed = {output, *nx.ancestors(graph.as_networkx(), output)}
        self.names = [name for name in graph.order if name in needed and not _is_input(graph, name)]
        layers = [
            SleepingLayer(graph.nodes[name], number, name == output)
            for number, name in enumerate(self.names)
        ]
        self.layers = nn.ModuleList(layers)
        self.seconds = [layer.seconds for layer in layers]

    def forward(self, x: Tensor) -> Tensor:
        values: dict[str, Tensor] = {}
        for name, layer in zip(self.names, self.layers, strict=True):
            given = [values.get(source, x) for source in self.graph.predecessors[name]]
            values[name] = layer(*(given or [x]))
        return values[self.names[-1]]


def _is_input(graph: Graph, name: str) -> bool:
    return graph.nodes[name].is_input and not graph.predecessors[name]


def scaled(graph: Graph, time_scale: float, byte_scale: float) -> Graph:
    """The graph with its times and its sizes multiplied."""
    return graph.with_nodes(
        replace(
            node,
            forward_seconds=node.forward_seconds * time_scale,
            backward_seconds=node.backward_seconds * time_scale,
            activation_bytes=tuple(size * byte_scale for size in node.activation_bytes),
            parameter_bytes=node.parameter_bytes * byte_scale,
        )
        for node in graph.nodes.values()
    )


def model(profile: str, time_scale: float, byte_scale: float) -> SleepingModel:
    """The factory of a run config."""
    return SleepingModel(scaled(read_graph(Path(profile)), time_scale, byte_scale))


def data(minibatches: int) -> tuple[TensorDataset, None]:
    """Examples for so many minibatches; none are held out."""
    zeros = torch.zeros(minibatches * BATCH, 1)
    return TensorDataset(zeros, zeros), None


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Zero, with a gradient."""
    return output[:, 0].mean()
