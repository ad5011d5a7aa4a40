"""Forward and backward passes of a stretch of nodes, with a clock mark before each node.

A layer timed alone runs with other caches than in training and is called in another way. So the
nodes run as one module, as a stage does, with marks in between, which cost almost nothing. The
times between the marks add up to the pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.hooks import RemovableHandle

from pipedream.capture.captured import Captured
from pipedream.capture.compiled import Trial, compiled, plain
from pipedream.capture.grouped import mark_groups
from pipedream.capture.segment import Segment, freeze_constants, segment
from pipedream.profiler.memory import address, saving
from pipedream.profiler.timing.stopwatch import Stopwatch

LOSS = "loss"
"""Stands for the loss where a node is named."""

_AFTER = ""
"""The mark after the last node."""

Loss = Callable[[Mapping[str, Tensor]], Tensor]
"""(values by name, the model's outputs among them) -> scalar."""


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass: of each node, and of the call before the first and after the last node.

    Without marks, all of it is in `call`.
    """

    nodes: Mapping[str, float]
    call: float

    @property
    def seconds(self) -> float:
        return sum(self.nodes.values()) + self.call


@dataclass(frozen=True)
class Turn:
    """A forward pass with its values by name, and the backward pass after it."""

    forward: Pass
    backward: Pass
    values: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Record:
    """The marks of one pass: its start, its end, and the nodes that begin in between."""

    start: Any
    noted: Sequence[tuple[str, Any]]
    end: Any

    def read(self, watch: Stopwatch) -> Pass:
        """Returns the seconds by node: from its mark to the next one."""
        if not self.noted:
            return Pass({}, watch.seconds(self.start, self.end))
        nodes: dict[str, float] = defaultdict(float)
        ends = [mark for _, mark in self.noted[1:]] + [self.end]
        for (name, begin), finish in zip(self.noted, ends, strict=True):
            nodes[name] += watch.seconds(begin, finish)
        before = watch.seconds(self.start, self.noted[0][1])
        return Pass(nodes, before + nodes.pop(_AFTER, 0.0))


class RandomGradients:
    """Random gradients of any shape, drawn once because drawing may take longer than a node."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.drawn: dict[torch.dtype, Tensor] = defaultdict(lambda: torch.empty(0))

    def like(self, value: Tensor) -> Tensor:
        if self.drawn[value.dtype].numel() < value.numel():
            self.drawn[value.dtype] = torch.randn(
                value.numel(), dtype=value.dtype, device=self.device
            )
        random_gradients = self.drawn[value.dtype][: value.numel()].view(value.shape)
        return torch.empty_like(value).copy_(random_gradients)


def gradients_of(results: Sequence[Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns those of what is given, from gradients of the results that are the same each time."""
    wanted = {name: value for name, value in given.items() if value.requires_grad}
    ends = [value for value in results if value.requires_grad]
    if not ends or not wanted:
        return {}
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(value.shape, generator=generator).to(value) for value in ends]
    found = torch.autograd.grad(ends, list(wanted.values()), drawn, allow_unused=True)
    pairs = zip(wanted, found, strict=True)
    return {name: gradient for name, gradient in pairs if gradient is not None}


class Stretch:
    """Nodes of a captured model as one module on a device, like a stage."""

    def __init__(
        self,
        captured: Captured,
        nodes: Sequence[str],
        watch: Stopwatch,
        device: torch.device,
        marked: bool,
        backend: str | None = None,
        eager: Collection[str] = (),
        trial: Trial | None = None,
    ) -> None:
        """`nodes` are in topological order; with `marked`, each of them is timed. Else they are
        compiled with torch.compile's `backend`, if it is given: by groups, but for those that are
        to be `eager`, and run by what `trial` returns.
        """
        part = segment(captured, nodes, keep=captured.outputs).to(device)
        self.part = freeze_constants(part, captured.owner)
        self.wants = [captured.values[name].requires_grad for name in part.inputs]
        self.watch = watch
        self.random_gradients = RandomGradients(device)
        self.noted: list[tuple[str, Any]] = []
        self.begins: dict[torch.autograd.graph.Node, str] = {}
        if marked:
            self.part = _with_marks(self.part, captured.owner, nodes, self._note)
        if marked or backend is None:
            self.compute = plain(self.part.module)
        else:
            mark_groups(self.part.module, captured, nodes, eager)
            self.compute = compiled(self.part.module, backend, device, trial)

    def run(self, values: Mapping[str, Tensor], loss: Loss | None = None) -> Turn:
        """Runs on the inputs among `values`; backward from the loss, or from random gradients.

        On a GPU right after another such turn, as in training: then the host is ahead of it as far
        as it can be. Where it cannot, passes take what handing them over takes.
        """
        if self.watch.hands_over:
            self._run(values, loss)
        forward, backward, outputs = self._run(values, loss)
        # Read only now: waiting for a GPU in between would leave it idle until the next pass.
        return Turn(forward.read(self.watch), backward.read(self.watch), outputs)

    def saved_bytes(self, values: Mapping[str, Tensor]) -> int:
        """Returns what a forward pass on the inputs among `values` saves for the backward pass,
        without parameters and buffers.
        """
        state = self.part.state
        with saving() as saved:
            results = self.compute(state, self._given(values))
        held = set(map(address, state.values()))
        del results
        return sum(size for place, size in saved.items() if place not in held)

    def gradients(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns those of parameters and inputs, from gradients of the outputs that are the same
        for each stretch of these nodes.
        """
        state = self.part.state
        inputs = self._given(values)
        results = self.compute(state, inputs)
        return gradients_of(results, state | dict(zip(self.part.inputs, inputs, strict=True)))

    def _run(
        self, values: Mapping[str, Tensor], loss: Loss | None
    ) -> tuple[_Record, _Record, Mapping[str, Tensor]]:
        """Returns the marks of both passes, and the outputs by name."""
        state = self.part.state
        inputs = self._given(values)
        self.watch.clear()
        start = self.watch.mark()
        self.noted, self.begins = [], {}
        results: Sequence[Tensor] = self.compute(state, inputs)
        outputs = dict(zip(self.part.outputs, results, strict=True))
        ends = (
            list(outputs.values()) if loss is None else [self._learn(loss, {**values, **outputs})]
        )
        forward = _Record(start, self.noted, self.watch.mark())
        wanted = [value for value in (*state.values(), *inputs) if value.requires_grad]
        backward = self._backward([end for end in ends if end.requires_grad], wanted)
        return forward, backward, {name: value.detach() for name, value in outputs.items()}

    def _given(self, values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Returns the inputs, as leaves of the pass."""
        return tuple(
            values[name].detach().requires_grad_(wants)
            for name, wants in zip(self.part.inputs, self.wants, strict=True)
        )

    def _learn(self, loss: Loss, known: Mapping[str, Tensor]) -> Tensor:
        if self.noted:
            self.noted[-1] = (LOSS, self.noted[-1][1])
        value = loss(known)
        self._note(_AFTER, value)
        return value

    def _backward(self, ends: Sequence[Tensor], wanted: Sequence[Tensor]) -> _Record:
        scalar = len(ends) == 1 and ends[0].dim() == 0
        gradients = None if scalar else [self.random_gradients.like(value) for value in ends]
        self.noted = []
        with self._noting():
            start = self.watch.mark()
            if ends and wanted:
                torch.autograd.backward(ends, gradients, inputs=wanted)
            end = self.watch.mark()
        for value in wanted:
            value.grad = None
        return _Record(start, self.noted, end)

    def _note(self, name: str, *outputs: Tensor) -> None:
        """Marks the start of `name`; the node before it has computed the values `outputs`."""
        for value in outputs:
            # An operator that returns its input unchanged has no backward pass.
            if value.grad_fn is not None and self.noted:
                self.begins.setdefault(value.grad_fn, self.noted[-1][0])
        self.noted.append((name, self.watch.mark()))

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Marks when the backward pass reaches a node, through a value that leaves the node.

        Of all that is ready, autograd runs first what was created last. So it visits the nodes in
        reverse order and finishes one before it starts the next.
        """

        def noting(name: str) -> Callable[[Any], None]:
            return lambda _: self.noted.append((name, self.watch.mark()))

        handles: list[RemovableHandle] = [
            begin.register_prehook(noting(name)) for begin, name in self.begins.items()
        ]
        self.begins = {}
        yield
        for handle in handles:
            handle.remove()


def _with_marks(
    part: Segment, owner: Mapping[str, str], nodes: Sequence[str], note: Callable[..., None]
) -> Segment:
    """Returns the module with its nodes in order, and calls of `note` before, between and after."""
    original = part.module.graph
    (output,) = original.find_nodes(op="output")
    inside: dict[str, list[fx.Node]] = {name: [] for name in nodes}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in original.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = graph.node_copy(node)
        elif node is not output:
            inside[owner[node.name]].append(node)
    ends: list[fx.Node] = []
    for name in nodes:
        graph.call_function(note, (name, *ends))
        for node in inside[name]:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        tensors = [n for n in inside[name] if isinstance(n.meta.get("val"), Tensor)]
        leaving = [n for n in tensors if any(owner.get(user.name) != name for user in n.users)]
        ends = [copies[node] for node in leaving]
    graph.call_function(note, (_AFTER, *ends))
    graph.output(fx.map_arg(output.args[0], copies.__getitem__))
    return Segment(fx.GraphModule(part.module, graph), part.inputs, part.outputs)
