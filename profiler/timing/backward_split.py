"""How a node's backward pass divides: gradients of its inputs (BI), then those of its weights (BW).

A run that divides backward passes executes programs cut from the joint graph of a stage
(capture/programs). So each node is cut in the same way, and its two halves are timed in turn. Only
the share of BI is used: together they do not take what autograd takes in a pass of the whole model.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pipedream.capture.captured import Captured
from pipedream.capture.fake_tensors import run_nodes
from pipedream.capture.node_modules import NodeModule
from pipedream.capture.programs.program import Program, traced_program
from pipedream.capture.programs.split_passes import Part
from pipedream.profiler.memory import MemoryOwners, address
from pipedream.profiler.timing.passes import RandomGradients
from pipedream.profiler.timing.per_node import empty_module
from pipedream.profiler.timing.stopping_rule import StoppingRule, counting, no_garbage_collection
from pipedream.profiler.timing.stopwatch import Stopwatch, stopwatch

_REPEATS, _FEWEST, _MOST = 3, 2, 3
"""Those that count; and so many times as many in all."""
_SECONDS = 1.0
"""After so many no repeat begins that is not needed."""


@dataclass(frozen=True)
class BackwardSplit:
    """`input_share`: the part of the backward pass that is BI, from 0 to 1. `kept_bytes`: of what
    the node makes and of the gradients of its outputs, what any BW needs after BI.
    """

    input_share: float
    kept_bytes: int


def backward_splits(
    captured: Captured,
    inputs: Sequence[Tensor],
    stopping_rule: StoppingRule,
    device: torch.device,
    meta: bool = False,
) -> dict[str, BackwardSplit]:
    """Returns the splits by node; those that cannot be cut are left out. Runs the model once, node
    by node: see `run_nodes`.

    `inputs` are in the order of `captured.inputs`. Buffers are restored.
    """
    values = captured.on_device(inputs, device)
    splitter = BackwardSplitter(captured, {} if meta else values, stopping_rule, device)
    with no_garbage_collection():
        run_nodes(captured, values, device, splitter.run_node, meta)
    return splitter.splits()


class _Kept(NamedTuple):
    """A tensor that BW needs after BI.

    `place`: of the value that has its memory, or whose `gradient` it is, among the inputs and then
    the outputs of the node; None for what neither comes in nor leaves.
    """

    place: int | None
    gradient: bool
    bytes: int


class _NodeCut(NamedTuple):
    input_share: float
    kept: Sequence[_Kept]


class BackwardSplitter:
    """Cuts nodes, which come in the order of the graph; those that do the same are cut once."""

    def __init__(
        self,
        captured: Captured,
        inputs: Mapping[str, Tensor],
        stopping_rule: StoppingRule,
        device: torch.device,
    ) -> None:
        self.captured, self.device = captured, device
        self.owners = MemoryOwners(inputs)
        self.repeats = min(stopping_rule.repeats or _REPEATS, _REPEATS)
        self.watch, self.random = stopwatch(device), RandomGradients(device)
        self.cuts: dict[Hashable, _NodeCut | None] = {}
        self.shares = dict.fromkeys(set(captured.graph.nodes) - set(captured.working), 1.0)
        self.kept: Counter[str] = Counter()
        self.counted: set[tuple[str, bool]] = set()
        self.shared = _read_by_several(captured)

    def run_node(self, node: NodeModule, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Runs a node on its inputs among `values`, cuts it, and returns its outputs."""
        inputs = [value.detach() for value in node.inputs(values)]
        with torch.no_grad():
            outputs = list(node.segment.module(*inputs))
        self.owners.of_node(node, inputs, outputs)
        if not node.parameters:
            self.shares[node.name] = 1.0
            return outputs
        kind = _kind(node, inputs)
        if kind not in self.cuts:
            self.cuts[kind] = self._cut(node, inputs)
        cut = self.cuts[kind]
        if cut is not None:
            self.shares[node.name] = cut.input_share
            self._count(node, cut.kept)
        return outputs

    def splits(self) -> dict[str, BackwardSplit]:
        """Returns the splits by node, once all have run."""
        return {name: BackwardSplit(s, self.kept[name]) for name, s in self.shares.items()}

    def _cut(self, node: NodeModule, inputs: Sequence[Tensor]) -> _NodeCut | None:
        # Whatever torch raises, such as of a backward pass that cannot be traced: the node as a
        # whole is measured, and readers of the profile make an assumption about its halves.
        try:
            halves = Halves.of(node, inputs, self.random)
            return _NodeCut(self._input_share(halves), halves.kept())
        except Exception:
            return None

    def _input_share(self, halves: Halves) -> float:
        if not _computes(halves.program.parts.inputs):
            return 0.0
        if not any(map(_computes, halves.program.parts.weights.values())):
            return 1.0
        shares = []
        for of_inputs, of_weights in halves.seconds(self.repeats, self.watch):
            input_seconds = max(0.0, of_inputs - self._call_seconds)
            shares.append(input_seconds / (input_seconds + of_weights) if of_weights else 1.0)
        return statistics.median(shares)

    @cached_property
    def _call_seconds(self) -> float:
        """Returns the seconds of a BI of nothing: a stage pays it once, here every node does."""
        halves = Halves.of(empty_module(), [torch.ones(1, device=self.device)], self.random)
        return statistics.median(bi for bi, _ in halves.seconds(_REPEATS, self.watch))

    def _count(self, node: NodeModule, kept: Sequence[_Kept]) -> None:
        """Counts each value and each gradient once, in the node that makes the value.

        The gradient of what several nodes read is the sum of what each of them computes.
        """
        names = (*node.segment.inputs, *node.segment.outputs)
        for place, gradient, size in kept:
            received = place is not None and place < len(node.segment.inputs)
            if place is None or (gradient and received and names[place] in self.shared):
                self.kept[node.name] += size
                continue
            value = names[place] if gradient else self.owners.first[names[place]]
            if (value, gradient) not in self.counted:
                self.counted.add((value, gradient))
                self.kept[self.captured.values[value].node] += size


@dataclass(frozen=True)
class Halves:
    """The program of a node on some inputs, its forward pass done."""

    program: Program
    state: Mapping[str, Tensor]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    saved: Mapping[fx.Node, Tensor]
    gradients: Sequence[Tensor]

    @staticmethod
    def of(node: NodeModule, inputs: Sequence[Tensor], random: RandomGradients) -> Halves:
        """Raises what torch raises if the node cannot be cut."""
        state = node.segment.state
        program = traced_program(node.segment.module, state, inputs, node.gradients)
        outputs, saved = program.forward(state, inputs, program.draw())
        gradients = [random.like(outputs[number]) for number in program.joint.differentiable]
        return Halves(program, state, inputs, outputs, saved, gradients)

    def seconds(self, repeats: int, watch: Stopwatch) -> list[tuple[float, float]]:
        """Returns the seconds of BI and BW in each of at most so many repeats that count, after a
        warm-up; in two at least, if the heap does not grow again and again.
        """
        self._run(watch)
        halves: list[tuple[float, float]] = []
        end, counted = time.monotonic() + _SECONDS, list[tuple[float, float]]()
        while len(halves) < _MOST * repeats and (
            len(counted) < min(_FEWEST, repeats)
            or (len(counted) < repeats and time.monotonic() < end)
        ):
            start, middle, stop = self._run(watch)
            halves.append((watch.seconds(start, middle), watch.seconds(middle, stop)))
            known = counting([sum(each) for each in halves])
            counted = [each for each in halves if sum(each) in known]
        return counted

    def _run(self, watch: Stopwatch) -> tuple[Any, Any, Any]:
        """Runs the halves, and returns the marks before, between and after."""
        saved = dict(self.saved)
        watch.clear()
        watch.lead()
        start = watch.mark()
        _, kept = self.program.backward(saved, self.gradients)
        middle = watch.mark()
        for _ in self.program.weight_gradients(kept):
            pass
        return start, middle, watch.mark()

    def kept(self) -> list[_Kept]:
        """Returns what is held from BI to BW, each memory once, without parameters and buffers."""
        of_inputs, kept = self.program.backward(dict(self.saved), self.gradients)
        values = (*self.inputs, *self.outputs)
        returned = [len(self.inputs) + number for number in self.program.joint.differentiable]
        places = {address(value): (place, False) for place, value in reversed([*enumerate(values)])}
        for place, gradient in (*zip(returned, self.gradients, strict=True), *enumerate(of_inputs)):
            if gradient is not None:
                places.setdefault(address(gradient), (place, True))
        state_addresses = set(map(address, self.state.values()))
        tensors = {address(tensor): tensor for tensor in kept.values.values()}
        return [
            _Kept(place, gradient, tensor.untyped_storage().nbytes())
            for where, tensor in tensors.items()
            if where not in state_addresses
            for place, gradient in [places.get(where, (None, False))]
        ]


def _read_by_several(captured: Captured) -> set[str]:
    """Returns the values that several nodes read."""
    owner = captured.owner
    makers = captured.module.graph.nodes
    return {m.name for m in makers if len({owner.get(u.name) for u in m.users}) > 1}


def _computes(part: Part) -> bool:
    """Tells whether it runs any operator: to pick one of several results is none."""
    called = (node for node in part.module.graph.nodes if node.op == "call_function")
    return any(node.target is not operator.getitem for node in called)


def _kind(node: NodeModule, inputs: Sequence[Tensor]) -> Hashable:
    """Returns what nodes that do the same have in common: operators, arguments, shapes, layouts."""
    module = node.segment.module
    names = {each: f"%{number}" for number, each in enumerate(module.graph.nodes)}
    state = {name: _layout(value) for name, value in node.segment.state.items()}
    operators = tuple(
        (
            state.get(str(each.target), str(each.target)) if each.op != "placeholder" else "",
            repr(fx.map_arg((each.args, dict(each.kwargs)), names.__getitem__)),
        )
        for each in module.graph.nodes
    )
    return operators, tuple(map(_layout, inputs)), node.gradients


def _layout(value: Tensor) -> Hashable:
    memory = value.untyped_storage().nbytes()
    return tuple(value.shape), value.stride(), value.dtype, memory, value.requires_grad
