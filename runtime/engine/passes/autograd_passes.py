"""The passes of one minibatch through a stage by autograd, whose graph stays between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipedream.runtime.engine.passes.passes import Passes
from pipedream.runtime.engine.passes.round_gradients import RoundGradients
from pipedream.runtime.stages.stage_module import StageModule


@dataclass
class AutogradPasses(Passes):
    """`edges`: by name graph edges, without data, of sent values that need a gradient; `roots`:
    where a backward pass under way begins, at the loss or at these edges, with its `gradients`.

    Two halves go through the graph twice: to what was received, then once more to the parameters.
    The gradients between operators are then computed twice, and all saved tensors stay until the
    second half.
    """

    stage_module: StageModule
    edges: dict[str, GradientEdge] = field(default_factory=dict)
    roots: Sequence[Tensor] | Sequence[GradientEdge] = ()
    gradients: Sequence[Tensor] | None = None

    def forward(
        self, tensors: Mapping[str, Tensor], known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Keeps the edges of what is sent, so that its data can be freed once sent."""
        piece, interface = self.stage_module.piece, self.stage_module.interface
        results = self.stage_module.compute(tensors, tuple(known[name] for name in piece.inputs))
        values = dict(zip(piece.outputs, results, strict=True))
        sent = {name: values[name] for name in interface.sent if values[name].requires_grad}
        self.edges = {name: get_gradient_edge(tensor) for name, tensor in sent.items()}
        return values

    def hold_ends(self, known: Mapping[str, Tensor]) -> None:
        """The graph of the loss holds them."""

    def forget(self) -> None:
        self.edges = {}

    def turn(self, loss: Tensor | None, gradients: Mapping[str, Tensor]) -> None:
        if loss is not None:
            self.roots, self.gradients = [loss] if loss.requires_grad else [], None
        else:
            names = [name for name in gradients if name in self.edges]
            self.roots = [self.edges[name] for name in names]
            self.gradients = [gradients[name] for name in names]
        self.edges = {}

    def backward(
        self, received: Mapping[str, Tensor], whole: RoundGradients | None = None
    ) -> dict[str, Tensor | None]:
        """A whole pass goes through the graph once, to received values and parameters."""
        leaves = list(received.values())
        if whole is None:
            self._propagate(leaves, retain_graph=True)
        else:
            with whole.accumulating() as parameters:
                self._propagate([*parameters, *leaves])
            self.roots, self.gradients = (), None
        return {name: tensor.grad for name, tensor in received.items()}

    def backward_weights(self, gradients: RoundGradients) -> None:
        if self.roots:
            with gradients.accumulating() as parameters:
                self._propagate(parameters)

    def holds(self, tensor: Tensor, others: Iterable[Tensor]) -> bool:
        """The graph holds all."""
        return True

    def _propagate(self, to: Sequence[Tensor], retain_graph: bool = False) -> None:
        """Adds to the `grad` of these leaves; with `retain_graph` the graph can be used again."""
        if self.roots and to:
            torch.autograd.backward(
                self.roots, self.gradients, retain_graph=retain_graph, inputs=to
            )
