"""Runs a stage as three programs, without autograd.

Between the passes it keeps exactly what the next one needs: after the gradients of the inputs, what
those of the weights need.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from pipedream.capture.programs.joint import Joint, joint
from pipedream.capture.programs.split_passes import Part, own_memory, split_passes

Values: TypeAlias = dict[fx.Node, Tensor]
"""What a pass leaves to the next ones."""


@dataclass(frozen=True)
class Kept:
    """Holds what weight gradients need, and the tangents of outputs `without` a gradient."""

    values: Values
    without: Set[fx.Node]


Compiler: TypeAlias = Callable[[fx.GraphModule], Callable[..., Any]]
"""Makes what runs in the place of a part: a function of the same list."""


def _as_it_is(module: fx.GraphModule) -> Callable[..., Any]:
    return module.forward


class Program:
    """The passes of training that a joint graph computes.

    Inputs, outputs and weights have its shapes and types in every pass; inputs, and gradients of
    outputs, that lie in memory in another way are copied. `compiler`: makes what runs of each
    program. Raises CannotDivide.
    """

    def __init__(self, joint: Joint, compiler: Compiler = _as_it_is) -> None:
        self.joint = joint
        self.parts = split_passes(self.joint)
        self.own = own_memory(self.joint.weight_gradients)
        weights = self.parts.weights.values()
        self.runs = {
            part.module: compiler(part.module) if part.needs != part.results else _handed_on
            for part in (self.parts.forward, self.parts.inputs, *weights)
        }

    def draw(self) -> tuple[Tensor, ...]:
        """Draws the random numbers of a forward pass. Seeds the generator where the module does."""
        with torch.no_grad():
            drawn: tuple[Tensor, ...] = self.joint.draws.module()
        return drawn

    def forward(
        self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], drawn: Sequence[Tensor] = ()
    ) -> tuple[tuple[Tensor, ...], Values]:
        """Runs the forward pass: returns the outputs of the module, and what is saved for the
        backward pass. `drawn`: by `draw`, for this pass alone.
        """
        known = {node: weights[name].detach() for name, node in self.joint.weights.items()}
        known.update((n, _laid_out(n, t)) for n, t in zip(self.joint.inputs, inputs, strict=True))
        known.update(zip(self.joint.draws.nodes, drawn, strict=True))
        outputs = self._run(self.parts.forward, known, self._saved)[: len(self.joint.outputs)]
        return outputs, {node: known[node] for node in self._saved if node in known}

    def backward(
        self, saved: Values, gradients: Sequence[Tensor | None]
    ) -> tuple[tuple[Tensor | None, ...], Kept]:
        """Runs the backward pass: returns the gradients of the inputs, None where there are none,
        and what is kept for those of the weights. Takes all from `saved`.

        `gradients`: of the outputs with the numbers `joint.differentiable`; None for one that the
        loss does not depend on.
        """
        tangents = dict(zip(self.joint.tangents, gradients, strict=True))
        without = frozenset(node for node, gradient in tangents.items() if gradient is None)
        values = {node: _laid_out(node, gradient) for node, gradient in tangents.items()} | saved
        saved.clear()
        ends = self.joint.input_gradients
        later = self._kept.keys() | {node for node in ends if node is not None}
        self._run(self.parts.inputs, values, later)
        of_inputs = tuple(
            None if node is None or self._from[node] <= without else values[node] for node in ends
        )
        return of_inputs, Kept({n: values[n] for n in self._kept if n in values}, without)

    def weight_gradients(self, kept: Kept) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters with their gradients, each as soon as it is there, in the order of
        a backward pass. Takes from `kept` what is not needed any more.

        A gradient whose name is in `own` has memory of its own; others share it.
        """
        for name, part in self.parts.weights.items():
            results = self._run(part, kept.values, self._later[name])
            if not self._from[part.results[0]] <= kept.without:
                yield name, results[0]
            del results

    def _run(self, part: Part, values: Values, later: Container[fx.Node]) -> tuple[Tensor, ...]:
        """Runs the part and returns the results, which are then among the `values`, where those
        needed `later` stay.

        Gradients are enabled, though nothing requires any: without, oneDNN's LSTM leaves out what
        its backward pass needs.
        """
        box = [values[node] if node in later else values.pop(node) for node in reversed(part.needs)]
        with torch.enable_grad():
            results: tuple[Tensor, ...] = self.runs[part.module](box)
        pairs = zip(part.results, results, strict=True)
        values.update((node, result) for node, result in pairs if node in later)
        return results

    @cached_property
    def _kept(self) -> Mapping[fx.Node, None]:
        """Returns the values that the gradients of the weights need, in a fixed order."""
        parts = self.parts.weights.values()
        return dict.fromkeys(node for part in parts for node in part.needs)

    @cached_property
    def _later(self) -> Mapping[str, Set[fx.Node]]:
        """Returns what gradients of later parameters need of each one's needs and results."""
        later, needed = dict[str, Set[fx.Node]](), set[fx.Node]()
        for name, part in reversed(list(self.parts.weights.items())):
            later[name] = {node for node in (*part.needs, *part.results) if node in needed}
            needed.update(part.needs)
        return later

    @cached_property
    def _saved(self) -> Mapping[fx.Node, None]:
        """Returns the values that the backward pass needs, in a fixed order."""
        gradients = (node for node in self.joint.input_gradients if node is not None)
        return dict.fromkeys([*self.parts.inputs.needs, *self._kept, *gradients])

    @cached_property
    def _from(self) -> Mapping[fx.Node, Set[fx.Node]]:
        """Returns the tangents that each value is computed from."""
        sources: dict[fx.Node, Set[fx.Node]] = {}
        for node in self.joint.module.graph.nodes:
            of = [sources[source] for source in node.all_input_nodes if sources[source]]
            sources[node] = frozenset[fx.Node]().union(*of) if len(of) != 1 else of[0]
            if node in self.joint.tangents:
                sources[node] = frozenset({node})
        return sources


def traced_program(
    module: fx.GraphModule,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    wants: Sequence[bool],
) -> Program:
    """Traces the passes of a module with parameters and buffers `state`.

    `wants`: of which inputs gradients are needed. Raises CannotDivide.
    """
    return Program(joint(module, state, inputs, wants, nullcontext()))


def _handed_on(box: list[Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensors of the box: runs a part without operators."""
    return tuple(reversed(box))


def _laid_out(node: fx.Node, tensor: Tensor | None) -> Tensor:
    """Returns the values, zeros by default, laid out as in the trace that chose operators."""
    traced: Tensor = node.meta["val"]
    if tensor is not None and tensor.stride() == traced.stride():
        return tensor.detach()
    values = torch.empty_strided(
        traced.shape, traced.stride(), dtype=traced.dtype, device=traced.device
    )
    return values.zero_() if tensor is None else values.copy_(tensor.detach())
