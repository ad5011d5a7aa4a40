"""The operators of a whole model's passes, and the graph node that each belongs to.

The passes are traced as one joint graph in which every operator is labelled when it is recorded:
in the forward pass with the node whose code runs, in the backward pass with the node that created
the autograd function that runs. Autograd adds up the gradients of a value that several functions
read after each of these functions but the first: such a sum belongs to the node of the function
before it, whose pass is also timed with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node as AutogradNode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from pipedream.capture.autograd_functions import autograd_nodes
from pipedream.capture.captured import Captured
from pipedream.capture.node_modules import preserve_model_state
from pipedream.capture.programs.description import describe
from pipedream.capture.programs.divisible import divisible
from pipedream.capture.programs.draws import note_seed
from pipedream.capture.programs.joint import CannotDivide, End, Joint, joint
from pipedream.capture.programs.loss_end import LossEnd, Target
from pipedream.capture.programs.split_passes import writes
from pipedream.capture.rewrites.writes import is_draw
from pipedream.capture.segment import Segment, freeze_constants, segment
from pipedream.graph.placements.operators import OperatorGraph

_LABEL = "graph_node"
"""Where the meta of an operator has the node that it belongs to, and whether it is backward."""


@dataclass(frozen=True)
class Attributed:
    """`graph` has the passes of a whole model, means as sums. `nodes`: by the name of each call the
    id of its node in graph.txt; `backward`: the names of the calls of the backward pass.
    """

    graph: OperatorGraph
    nodes: Mapping[str, str]
    backward: Set[str]


def attribute(
    captured: Captured,
    inputs: Sequence[Tensor],
    device: torch.device,
    precision: AbstractContextManager[Any],
    loss: LossEnd | None = None,
    target: Target | None = None,
) -> Attributed:
    """Traces the model on the device, on inputs such as these (in the order of `captured.inputs`).
    Nothing is computed but constants. `precision`: the context of the forward pass, which is
    entered twice. With a `loss`, for this `target`, the passes end in it; it belongs to the last
    node that returns an output. Raises CannotDivide.
    """
    with _model_on(captured, device) as whole:
        values = dict(zip(captured.inputs, inputs, strict=True))
        names, end, nodes = whole.inputs, None, GraphNodes.of(captured)
        if loss is not None and target is not None:
            values |= target.tensors
            names = loss.inputs(whole, target)
            end = loss.end(whole, names, target)
        traced = nodes.joint(
            whole.module,
            whole.state,
            [values[name].to(device) for name in names],
            [name in whole.inputs and captured.values[name].requires_grad for name in names],
            precision,
            end,
            seeds=True,
        )
    writes(traced)  # what a run would refuse is refused here
    summed = divisible(traced)
    graph = describe(summed)
    labels = _labels_of(graph, summed)
    backward = frozenset(name for name, (_, later) in labels.items() if later)
    return Attributed(graph, node_of_calls(graph, summed), backward)


@dataclass(frozen=True)
class GraphNodes:
    """The graph node of each operator of a captured model, by name, and the last that returns
    anything, to which the loss belongs.
    """

    owner: Mapping[str, str]
    returning: str

    @staticmethod
    def of(captured: Captured) -> GraphNodes:
        return GraphNodes(captured.owner, captured.returning)

    def joint(
        self,
        module: fx.GraphModule,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        wants: Sequence[bool],
        precision: AbstractContextManager[Any],
        end: End | None = None,
        seeds: bool = False,
    ) -> Joint:
        """Traces the passes of a part of the model as `joint` does, its operators labelled with
        their nodes. `seeds`: gives each draw a seed of its own, where the module does not.
        """
        labels = _Labels()
        ended = None if end is None else labels.ending(end, self.returning)
        labelling = _labelling(module, self.owner, labels, seeds)
        traced = joint(labelling, state, inputs, wants, precision, ended)
        labels.finish(traced.module.graph)
        return traced


def node_of_calls(graph: OperatorGraph, traced: Joint) -> dict[str, str]:
    """Returns the node of each call of a graph that describes a labelled trace, by its name."""
    return {name: node for name, (node, _) in _labels_of(graph, traced).items()}


def node_of(operator: fx.Node) -> str | None:
    """Returns the graph node of an operator of a labelled trace; None for what is no operator."""
    label: tuple[str, bool] | None = operator.meta.get(_LABEL)
    return None if label is None else label[0]


def _labels_of(graph: OperatorGraph, traced: Joint) -> dict[str, tuple[str, bool]]:
    nodes = {node.name: node for node in traced.module.graph.nodes}
    return {call.name: nodes[call.name].meta[_LABEL] for call in graph.calls}


@contextmanager
def _model_on(captured: Captured, device: torch.device) -> Iterator[Segment]:
    """Gives all nodes as one segment on the device; a fake model stays on the CPU, where it claims
    to be. On exit the model is back where it was.
    """
    whole = segment(captured, captured.working, keep=captured.outputs)
    tensors = (*captured.module.parameters(), *captured.module.buffers())
    if any(isinstance(each, FakeTensor) for each in tensors):
        if device.type != "cpu":
            raise CannotDivide("a model without memory can be traced on the CPU alone")
        yield freeze_constants(whole, captured.owner)
    else:
        with preserve_model_state(captured):
            yield freeze_constants(whole.to(device), captured.owner)


class _Labels:
    """Labels operators as they are recorded, back to the last that has a label."""

    def __init__(self) -> None:
        self.running = ("", False)
        self.graph: fx.Graph | None = None
        self.created: set[AutogradNode] = set()
        """Those that exist stay alive, as another might get the identity of one that does not."""

    def seed(self) -> None:
        """Gives the next draw a seed of its own, an input of the passes, as in a run."""
        note_seed(nn.Identity())

    def ran(self, node: str, result: Any) -> None:
        """Labels what was recorded for an operator of `node`, and later its backward pass."""
        mode = get_proxy_mode()
        if mode is None:
            return
        self.graph = mode.tracer.graph
        self.running = (node, False)
        self.write(self.graph)
        for function in autograd_nodes(result, self.created):
            function.register_prehook(lambda _gradients: self._begin_backward(node))

    def ending(self, end: End, node: str) -> End:
        """Returns the same, as operators of `node`."""

        def labelled(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> Sequence[Tensor]:
            results = end(outputs, values)
            self.ran(node, results)
            return results

        return labelled

    def finish(self, graph: fx.Graph) -> None:
        """Labels the rest of the backward pass, and lets go of what autograd holds. New values of
        buffers, which are written last of all, have labels already.
        """
        for node in graph.nodes:
            node.meta.setdefault(_LABEL, self.running)
        self.created.clear()

    def write(self, graph: fx.Graph) -> None:
        """Labels what was recorded since the last call."""
        for node in reversed(graph.nodes):
            if _LABEL in node.meta:
                break
            node.meta[_LABEL] = self.running

    def _begin_backward(self, node: str) -> None:
        assert self.graph is not None
        self.write(self.graph)
        self.running = (node, True)


def _labelling(
    module: fx.GraphModule, owner: Mapping[str, str], labels: _Labels, seeds: bool
) -> fx.GraphModule:
    """Returns the module, calling `labels.ran` after operators, `labels.seed` before draws."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if seeds and is_draw(node):
            graph.call_function(labels.seed, ())
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "call_function" and node.name in owner:
            graph.call_function(labels.ran, (owner[node.name], copies[node]))
    return fx.GraphModule(module, graph)
