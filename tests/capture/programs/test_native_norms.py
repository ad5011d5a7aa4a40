"""Batch norms as a GPU's libraries have them become torch's own. There is no GPU: the graphs are
rewritten by hand to what autograd records on one.
"""

from __future__ import annotations

import operator

import pytest
import torch
from joint_models import Traced, trace
from torch import Tensor, fx, nn

from pipedream.capture.programs.description import describe
from pipedream.capture.programs.divisible import use_native_batch_norms

_aten = torch.ops.aten


def network() -> Traced:
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2)),
    )
    return trace(layers, (torch.randn(5, 3, 8, 8),))


def results(traced: Traced) -> list[Tensor]:
    """Outputs, gradients, and buffers after the passes."""
    values = {node: tensor.clone() for node, tensor in traced.values.items()}
    placeholders = traced.joint.module.graph.find_nodes(op="placeholder")
    inputs = [values[node] for node in placeholders]
    return [*fx.Interpreter(traced.joint.module).run(*inputs), *inputs]


def as_library(graph: fx.Graph, library: str) -> None:
    """As autograd records `aten.batch_norm` where a library computes it."""
    forward: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is _aten.native_batch_norm.default:
            node.target = getattr(_aten, f"{library}_batch_norm").default
            if library == "cudnn":
                node.meta["val"] = (*node.meta["val"], torch.empty(0, dtype=torch.uint8))
                with graph.inserting_after(node):
                    kept = graph.call_function(operator.getitem, (node, 3))
                forward[node.args[0]] = kept
                kept.meta["val"] = node.meta["val"][3]
        elif node.target is _aten.native_batch_norm_backward.default:
            node.target = getattr(_aten, f"{library}_batch_norm_backward").default
            gradient, data, *others, training, eps, _ = node.args
            assert training
            kept_args = (forward[data],) if library == "cudnn" else ()
            node.args = (data, gradient, *others, eps, *kept_args)


@pytest.mark.parametrize("library", ["cudnn", "miopen"])
def test_they_compute_the_same(library: str) -> None:
    plain, traced = network(), network()
    graph = traced.joint.module.graph
    as_library(graph, library)
    traced.joint.module.recompile()
    targets = {str(node.target) for node in graph.nodes}
    assert f"aten.{library}_batch_norm_backward.default" in targets
    assert use_native_batch_norms(traced.joint) is traced.joint
    graph.lint()
    assert describe(traced.joint) == describe(plain.joint)
    for one, other in zip(results(traced), results(plain), strict=True):
        assert torch.equal(one, other)


def test_other_graphs_stay_as_they_are() -> None:
    traced = network()
    before = describe(traced.joint)
    assert describe(use_native_batch_norms(traced.joint)) == before
