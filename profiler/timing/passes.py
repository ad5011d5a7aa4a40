"""Passes of a stretch of the model, forward and backward, with a mark before each of its nodes.

A layer that is timed by itself finds other caches than in training, and is called in another way.
So the time is taken where it is spent: the nodes run as one module, as a stage does, and a note of
the clock between two of them costs next to nothing. What lies between the marks adds up to the
pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor, fx
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from pipedream.capture.export import Captured
from pipedream.capture.segment import Segment, freeze_constants, segment
from pipedream.profiler.timing.stopwatch import Mark, Stopwatch

LOSS = "loss"
"""Takes the place of a node for what the loss takes."""

_AFTER = ""
"""What begins when the last node has ended."""

Loss = Callable[[Mapping[str, Tensor]], Tensor]
"""(values by name, the model's outputs among them) -> scalar."""


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass: those of each node, and of the call before the first and after the last.

    Without marks all of it is the call's.
    """

    nodes: Mapping[str, float]
    call: float

    @property
    def seconds(self) -> float:
        return sum(self.nodes.values()) + self.call


@dataclass(frozen=True)
class Turn:
    """A forward pass and the backward pass after it, and what the former gave, by name."""

    forward: Pass
    backward: Pass
    values: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Record(Generic[Mark]):
    """The marks of one pass: its start and end, and what begins at those between."""

    start: Mark
    noted: Sequence[tuple[str, Mark]]
    end: Mark

    def read(self, watch: Stopwatch[Mark]) -> Pass:
        """What lies between two marks belongs to what begins at the first."""
        if not self.noted:
            return Pass({}, watch.seconds(self.start, self.end))
        nodes: dict[str, float] = defaultdict(float)
        ends = [mark for _, mark in self.noted[1:]] + [self.end]
        for (name, begin), finish in zip(self.noted, ends, strict=True):
            nodes[name] += watch.seconds(begin, finish)
        before = watch.seconds(self.start, self.noted[0][1])
        return Pass(nodes, before + nodes.pop(_AFTER, 0.0))


class RandomGradients:
    """Random gradients for any output, drawn once: drawing can cost more than the node."""

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


class Stretch:
    """Nodes of a captured model in one module, as a stage has them, on a device."""

    def __init__(
        self,
        captured: Captured,
        nodes: Sequence[str],
        watch: Stopwatch[Any],
        device: torch.device,
        marked: bool,
    ) -> None:
        """`nodes` in a topological order; with `marked` each is timed, else the whole alone."""
        part = segment(captured, nodes, keep=captured.outputs).to(device)
        self.part = freeze_constants(part, captured.owner)
        self.wants = [captured.values[name].requires_grad for name in part.inputs]
        self.watch = watch
        self.random_gradients = RandomGradients(device)
        self.noted: list[tuple[str, Any]] = []
        self.begins: dict[torch.autograd.graph.Node, str] = {}
        if marked:
            self.part = _with_marks(self.part, captured.owner, nodes, self._note)

    def run(self, values: Mapping[str, Tensor], loss: Loss | None = None) -> Turn:
        """On the inputs among `values`; backward from the loss, or from random gradients."""
        module = self.part.module
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        inputs = [
            values[name].detach().requires_grad_(wants)
            for name, wants in zip(self.part.inputs, self.wants, strict=True)
        ]
        self.watch.clear()
        start = self.watch.mark()
        self.noted, self.begins = [], {}
        results: Sequence[Tensor] = functional_call(module, held, tuple(inputs))
        made = dict(zip(self.part.outputs, results, strict=True))
        ends = list(made.values()) if loss is None else [self._learn(loss, {**values, **made})]
        forward = _Record(start, self.noted, self.watch.mark())
        wanted = [value for value in (*held.values(), *inputs) if value.requires_grad]
        backward = self._backward([end for end in ends if end.requires_grad], wanted)
        # Read only now: a GPU waited for in between would idle until the next pass begins.
        left = {name: value.detach() for name, value in made.items()}
        return Turn(forward.read(self.watch), backward.read(self.watch), left)

    def _learn(self, loss: Loss, known: Mapping[str, Tensor]) -> Tensor:
        if self.noted:
            self.noted[-1] = (LOSS, self.noted[-1][1])
        found = loss(known)
        self._note(_AFTER, found)
        return found

    def _backward(self, ends: Sequence[Tensor], wanted: Sequence[Tensor]) -> _Record[Any]:
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

    def _note(self, name: str, *made: Tensor) -> None:
        """What begins here; what came before has made these values."""
        for value in made:
            # An operator that hands a tensor on as it is has no part in the backward pass.
            if value.grad_fn is not None and self.noted:
                self.begins.setdefault(value.grad_fn, self.noted[-1][0])
        self.noted.append((name, self.watch.mark()))

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Marks when the backward pass comes to a node, by way of one of the values that leave it.

        Autograd takes what was made last first, of all that is ready: so it comes to the nodes in
        the reverse of their order, and is done with one before it begins with the next.
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
    """The same module, node after node, with a call of `note` before each and after the last."""
    given = part.module.graph
    (output,) = given.find_nodes(op="output")
    inside: dict[str, list[fx.Node]] = {name: [] for name in nodes}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in given.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = graph.node_copy(node)
        elif node is not output:
            inside[owner[node.name]].append(node)
    made: list[fx.Node] = []
    for name in nodes:
        graph.call_function(note, (name, *made))
        for node in inside[name]:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        made = [copies[node] for node in inside[name] if _is_tensor(node) and _leaves(node, owner)]
    graph.call_function(note, (_AFTER, *made))
    graph.output(fx.map_arg(output.args[0], copies.__getitem__))
    return Segment(fx.GraphModule(part.module, graph), part.inputs, part.outputs)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _leaves(node: fx.Node, owner: Mapping[str, str]) -> bool:
    return any(owner.get(user.name) != owner[node.name] for user in node.users)
