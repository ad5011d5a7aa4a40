"""A joint graph for one device of a mesh: its operators on local tensors, redistributed in between.

The counterpart of SPMD partitioning in GSPMD and Alpa: every device executes the same operators in
the same order, each on its part, so that the devices of an axis come to the same collectives.
Where strategies say that devices add up in the middle of an operator, `batch_norms` executes it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pipedream.capture.fake_values import fake_mode_of
from pipedream.capture.programs.batch_norms import AddUp, DividedBatchNorm
from pipedream.capture.programs.description import executable, read_arguments, value_name
from pipedream.capture.programs.joint import Joint
from pipedream.graph.placements.operators import Operator, OperatorCall
from pipedream.graph.placements.placement import Placements, Replicate, coordinates
from pipedream.graph.placements.regions import held_region
from pipedream.sharding.assignment import Assignment, inner_sums, output_target, steps_between
from pipedream.sharding.rules import local_operator, summed_types
from pipedream.sharding.steps import Step

Move: TypeAlias = Callable[[Tensor, tuple[int, ...], Sequence[Step]], Tensor]
"""Of a local tensor, the shape of the whole one and steps: what the device holds after them."""

_GIVEN_WHOLE = frozenset(("draw", "constant"))
"""Roles of what every device is given whole: random numbers are drawn as without a mesh."""


@dataclass(frozen=True)
class BoundaryPlacements:
    """Says how values come to a graph and leave it, by name, where that is not as the assignment
    says.

    `whole_inputs`: each device has all of these, and of their gradients. `outputs`: instead of
    whole. `gradients`: of parameters, such as partial where those of other graphs are, which they
    are added to.
    """

    whole_inputs: Set[str] = frozenset()
    outputs: Mapping[str, Placements] = field(default_factory=dict)
    gradients: Mapping[str, Placements] = field(default_factory=dict)


_AS_ASSIGNED = BoundaryPlacements()


def localize(
    joint: Joint,
    assignment: Assignment,
    device: int,
    move: Move,
    boundary: BoundaryPlacements = _AS_ASSIGNED,
) -> Joint:
    """Returns the graph that `device` executes. Parameters, inputs and tangents are local, placed
    as the assignment says; random numbers are whole; outputs and gradients are placed as
    `output_target` says. All that if `boundary` does not say something else.
    """
    return _Localizer(joint, assignment, device, move, boundary).run()


class Redistribution:
    """A node's target: redistributes a local tensor."""

    def __init__(self, move: Move, shape: tuple[int, ...], steps: Sequence[Step]) -> None:
        self.move, self.shape, self.steps = move, shape, tuple(steps)
        self.__name__ = self.__qualname__ = "redistribute"

    def __call__(self, local: Tensor) -> Tensor:
        return self.move(local, self.shape, self.steps)


class _Localizer:
    """Holds new `nodes` by the old ones; `known`: by value and placements."""

    def __init__(
        self,
        joint: Joint,
        assignment: Assignment,
        device: int,
        move: Move,
        boundary: BoundaryPlacements,
    ) -> None:
        self.joint, self.assignment, self.device, self.move = joint, assignment, device, move
        self.boundary = boundary
        self.everywhere = (Replicate(),) * len(assignment.mesh.sizes)
        self.calls = {call.name: call for call in assignment.graph.calls}
        self.types = assignment.graph.types()
        self.whole = {
            each.value
            for each in assignment.graph.inputs
            if each.role in _GIVEN_WHOLE
            or (each.role == "input" and each.name in boundary.whole_inputs)
        }
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.known: dict[tuple[str, Placements], fx.Node] = {}

    def run(self) -> Joint:
        old = self.joint
        for node in old.module.graph.nodes:
            if node.op == "output":
                continue
            self.nodes[node] = self._copied(node)
            value = value_name(node)
            if value in self.types:
                self.known[value, self._initial(value)] = self.nodes[node]
        boundary, everywhere = self.boundary, self.everywhere
        whole_inputs = dict.fromkeys(boundary.whole_inputs, everywhere)
        outputs = [
            self._at(value_name(node), boundary.outputs.get(str(k), everywhere))
            for k, node in enumerate(old.outputs)
        ]
        inputs = [
            self._end(node, "input gradient", str(k), whole_inputs.get(str(k)))
            for k, node in enumerate(old.input_gradients)
        ]
        weights = [
            self._end(node, "parameter gradient", name, boundary.gradients.get(name))
            for name, node in old.weight_gradients.items()
        ]
        self.graph.output([*outputs, *inputs, *weights])
        return replace(
            old,
            module=fx.GraphModule(old.module, self.graph),
            weights={name: self.nodes[node] for name, node in old.weights.items()},
            inputs=[self.nodes[node] for node in old.inputs],
            draws=replace(old.draws, nodes=[self.nodes[node] for node in old.draws.nodes]),
            tangents=[self.nodes[node] for node in old.tangents],
            outputs=outputs,
            input_gradients=inputs,
            weight_gradients=dict(zip(old.weight_gradients, weights, strict=True)),
        )

    def _copied(self, node: fx.Node) -> fx.Node:
        if node.op in ("placeholder", "get_attr"):
            copy = self.graph.node_copy(node)
            value = value_name(node)
            copy.meta["val"] = self._local(node.meta["val"], value, self._initial(value))
            return copy
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            copy = self.graph.call_function(operator.getitem, (self.nodes[source], index))
            copy.meta["val"] = self.nodes[source].meta["val"][index]
            return copy
        return self._call(node, self.calls[node.name])

    def _call(self, node: fx.Node, call: OperatorCall) -> fx.Node:
        targets = self.assignment.targets(call.name)
        reads = [self._at(v, target) for v, target in zip(call.reads, targets, strict=True)]
        local = self._local_operator(call)
        args, kwargs = read_arguments(local, reads)
        target: Callable[..., Any] = executable(local)
        if inner_sums(call, self.assignment.strategies[call.name], self.assignment.mesh):
            run = DividedBatchNorm(call.operator, local, self._add_up(call))
            copy = self.graph.call_function(run, tuple(reads))
            target, args, kwargs = run.like, (list(reads),), {}
        else:
            copy = self.graph.call_function(target, args, kwargs)
        copy.meta = dict(node.meta)
        with self.mode, torch.no_grad():
            fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
            copy.meta["val"] = target(*fake_args, **fake_kwargs)
        return copy

    def _local_operator(self, call: OperatorCall) -> Operator:
        sizes, local = self.assignment.mesh.sizes, call.operator
        places, strategies = coordinates(sizes, self.device), self.assignment.strategies[call.name]
        for strategy, size, place in zip(strategies, sizes, places, strict=True):
            local = local_operator(local, strategy, size, place)
        return local

    def _add_up(self, call: OperatorCall) -> AddUp:
        """Returns what the device calls in the middle of an operator."""
        sums = inner_sums(call, self.assignment.strategies[call.name], self.assignment.mesh)
        shapes = [type_.shape for type_ in summed_types(call.operator)]
        return lambda number, term: self.move(term, shapes[number], sums[number].steps)

    def _initial(self, value: str) -> Placements:
        """Returns how the device has a value before any redistribution."""
        if value in self.whole:
            return self.everywhere
        return self.assignment.placed[value]

    def _at(self, value: str, target: Placements) -> fx.Node:
        """Returns the value in this placement: redistributed once, whoever reads it."""
        placed = self.known.get((value, target))
        if placed is None:
            source, type_ = self._initial(value), self.types[value]
            steps = steps_between(type_, self.assignment.mesh, source, target)
            before = self.known[value, source]
            run = Redistribution(self.move, type_.shape, steps)
            placed = self.graph.call_function(run, (before,))
            placed.meta["val"] = self._local(before.meta["val"], value, target)
            self.known[value, target] = placed
        return placed

    def _end(
        self, node: fx.Node | None, role: str, name: str, wanted: Placements | None
    ) -> fx.Node | None:
        """Returns a gradient, if there is one, as `wanted` or else as `output_target` says: of this
        input or parameter, since others may have the same.
        """
        if node is None:
            return None
        value, outputs = value_name(node), self.assignment.graph.outputs
        if wanted is None:
            output = next(each for each in outputs if (each.role, each.name) == (role, name))
            inputs = self.assignment.placed_inputs
            wanted = output_target(output, self._initial(value), inputs)
        return self._at(value, wanted)

    def _local(self, like: Tensor, value: str, placements: Placements) -> Tensor:
        """Makes the device's part of a value without contents, laid out in memory alike."""
        whole, sizes = self.types[value].shape, self.assignment.mesh.sizes
        shape = held_region(whole, sizes, placements, self.device).shape
        if shape == tuple(like.shape):
            return like
        strides, step = [0] * len(shape), 1
        for dim in sorted(range(len(shape)), key=lambda dim: (like.stride(dim), -dim)):
            strides[dim], step = step, step * max(1, shape[dim])
        with self.mode:
            return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)

    @cached_property
    def mode(self) -> FakeTensorMode:
        """Returns the mode of the trace, whose tensors the new graph's begin with."""
        return fake_mode_of(node.meta.get("val") for node in self.joint.module.graph.nodes)
