"""Runs a stage as three programs, without autograd.

Between the passes it keeps exactly what the next one needs: after the gradients of the inputs, what
those of the weights need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from pipedream.capture.programs.cut import Part, cut
from pipedream.capture.programs.joint import joint
from pipedream.capture.programs.memory import own_memory

Values: TypeAlias = dict[fx.Node, Tensor]
"""What a pass leaves to the next ones."""


@dataclass(frozen=True)
class Kept:
    """What is left after the gradients of the inputs, which came from outputs but those `without` a
    gradient."""

    values: Values
    without: Set[fx.Node]


Compiler: TypeAlias = Callable[[fx.GraphModule], Callable[..., Any]]


_UNCHANGED = nullcontext()


def _as_it_is(module: fx.GraphModule) -> Callable[..., Any]:
    return module


class Program:
    """A module as the passes of training.

    `state`: its parameters and buffers by name; `wants`: of which of its inputs gradients are
    needed. Inputs, outputs and weights have these shapes and types in every pass. `precision`: the
    context of the forward pass, to be entered twice. `compiler`: makes what runs of each program.

    Raises CannotDivide.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        wants: Sequence[bool],
        precision: AbstractContextManager[Any] = _UNCHANGED,
        compiler: Compiler = _as_it_is,
    ) -> None:
        self.joint = joint(module, state, inputs, wants, precision)
        self.parts = cut(self.joint)
        self.own = own_memory(self.joint.weight_gradients)
        weights = self.parts.weights.values()
        modules = (part.module for part in (self.parts.forward, self.parts.inputs, *weights))
        self.runs = {module: compiler(module) for module in modules}

    def draw(self) -> tuple[Tensor, ...]:
        """The random numbers of a forward pass. Seeds the generator where the module does."""
        with torch.no_grad():
            drawn: tuple[Tensor, ...] = self.joint.draws.module()
        return drawn

    def forward(
        self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], drawn: Sequence[Tensor] = ()
    ) -> tuple[tuple[Tensor, ...], Values]:
        """The outputs of the module, and what is saved for the backward pass. `drawn`: by `draw`,
        for this pass alone.
        """
        known = {node: weights[name] for name, node in self.joint.weights.items()}
        known.update(zip(self.joint.inputs, inputs, strict=True))
        known.update(zip(self.joint.draws.nodes, drawn, strict=True))
        results = self._run(self.parts.forward, known)
        count = len(self.joint.outputs)
        known.update(zip(self.parts.forward.results, results, strict=True))
        return results[:count], {node: known[node] for node in self._saved if node in known}

    def backward(
        self, saved: Values, gradients: Sequence[Tensor | None]
    ) -> tuple[tuple[Tensor | None, ...], Kept]:
        """The gradients of the inputs, None where there are none, and what is kept for those of the
        weights. Takes all from `saved`.

        `gradients`: of the outputs with the numbers `joint.differentiable`; None for one that the
        loss does not depend on.
        """
        tangents = dict(zip(self.joint.tangents, gradients, strict=True))
        without = frozenset(node for node, gradient in tangents.items() if gradient is None)
        known = {
            **saved,
            **{node: _zeros(node) if g is None else g for node, g in tangents.items()},
        }
        saved.clear()
        known.update(
            zip(self.parts.inputs.results, self._run(self.parts.inputs, known), strict=True)
        )
        of_inputs = tuple(
            None if node is None or self._from[node] <= without else known[node]
            for node in self.joint.input_gradients
        )
        return of_inputs, Kept({n: known[n] for n in self._kept if n in known}, without)

    def weight_gradients(self, kept: Kept) -> Iterator[tuple[str, Tensor]]:
        """The parameters with their gradients, each as soon as it is there, in the order of a
        backward pass. Takes from `kept` what is not needed any more.

        A gradient whose name is in `own` has memory of its own; others share it.
        """
        values, left = kept.values, Counter(self._kept)
        for name, part in self.parts.weights.items():
            results = self._run(part, values)
            values.update(zip(part.results, results, strict=True))
            left.subtract(part.needs)
            for node in (*part.needs, *part.results):
                if not left[node]:
                    values.pop(node, None)
            if not self._from[part.results[0]] <= kept.without:
                yield name, results[0]
            del results

    def _run(self, part: Part, known: Mapping[fx.Node, Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            results: tuple[Tensor, ...] = self.runs[part.module](*(known[n] for n in part.needs))
        return results

    @cached_property
    def _kept(self) -> Counter[fx.Node]:
        """How many parts of the weights need a value."""
        return Counter(node for part in self.parts.weights.values() for node in part.needs)

    @cached_property
    def _saved(self) -> tuple[fx.Node, ...]:
        """The values that the backward pass needs, in a fixed order."""
        gradients = (node for node in self.joint.input_gradients if node is not None)
        return tuple(dict.fromkeys([*self.parts.inputs.needs, *self._kept, *gradients]))

    @cached_property
    def _from(self) -> Mapping[fx.Node, Set[fx.Node]]:
        """The tangents that each value is computed from."""
        found: dict[fx.Node, Set[fx.Node]] = {}
        for node in self.joint.module.graph.nodes:
            of = [found[source] for source in node.all_input_nodes if found[source]]
            found[node] = frozenset[fx.Node]().union(*of) if len(of) != 1 else of[0]
            if node in self.joint.tangents:
                found[node] = frozenset({node})
        return found


def _zeros(tangent: fx.Node) -> Tensor:
    value = tangent.meta["val"]
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
