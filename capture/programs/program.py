"""Runs a stage as three programs, without autograd.

Between the passes it keeps exactly what the next one needs: after the gradients of the inputs, what
those of the weights need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor, fx

from pipedream.capture.programs.cut import Part, cut
from pipedream.capture.programs.joint import joint

Values: TypeAlias = dict[fx.Node, Tensor]
"""What a pass leaves to the next ones."""


class Program:
    """A module as the passes of training.

    `state`: its parameters and buffers by name; `wants`: of which of its inputs gradients are
    needed. Inputs, outputs and weights have these shapes and types in every pass.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        wants: Sequence[bool],
    ) -> None:
        self.joint = joint(module, state, inputs, wants)
        self.parts = cut(self.joint)

    def forward(
        self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], Values]:
        """The outputs of the module, and what is saved for the backward pass."""
        known = {node: weights[name] for name, node in self.joint.weights.items()}
        known.update(zip(self.joint.inputs, inputs, strict=True))
        results = _run(self.parts.forward, known)
        count = len(self.joint.outputs)
        known.update(zip(self.parts.forward.results, results, strict=True))
        return results[:count], {node: known[node] for node in self._saved if node in known}

    def backward(
        self, saved: Values, gradients: Sequence[Tensor]
    ) -> tuple[tuple[Tensor | None, ...], Values]:
        """The gradients of the inputs, None where there are none, and what is kept for those of the
        weights. Takes all from `saved`.

        `gradients`: of the outputs with the numbers `joint.differentiable`.
        """
        known = {**saved, **dict(zip(self.joint.tangents, gradients, strict=True))}
        saved.clear()
        known.update(zip(self.parts.inputs.results, _run(self.parts.inputs, known), strict=True))
        of_inputs = (None if node is None else known[node] for node in self.joint.input_gradients)
        return tuple(of_inputs), {node: known[node] for node in self._kept if node in known}

    def weight_gradients(self, kept: Values) -> Iterator[tuple[str, Tensor]]:
        """The parameters with their gradients, each as soon as it is there, in the order of a
        backward pass. Takes from `kept` what is not needed any more.
        """
        left = Counter(self._kept)
        for name, part in self.parts.weights.items():
            results = _run(part, kept)
            kept.update(zip(part.results, results, strict=True))
            left.subtract(part.needs)
            for node in (*part.needs, *part.results):
                if not left[node]:
                    kept.pop(node, None)
            yield name, results[0]
            del results

    @cached_property
    def _kept(self) -> Counter[fx.Node]:
        """How many parts of the weights need a value."""
        return Counter(node for part in self.parts.weights.values() for node in part.needs)

    @cached_property
    def _saved(self) -> tuple[fx.Node, ...]:
        """The values that the backward pass needs, in a fixed order."""
        gradients = (node for node in self.joint.input_gradients if node is not None)
        return tuple(dict.fromkeys([*self.parts.inputs.needs, *self._kept, *gradients]))


def _run(part: Part, known: Mapping[fx.Node, Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        results: tuple[Tensor, ...] = part.module(*(known[node] for node in part.needs))
    return results
