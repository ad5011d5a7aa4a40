"""Operators that run again in programs: the same gradients, bit for bit, and less that is saved."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from joint_models import WORDS
from sharded_runs import captured
from torch import Tensor, fx, nn

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.capture.programs.attribution import GraphNodes
from pipedream.capture.programs.batch_norms import DividedBatchNorm
from pipedream.capture.programs.description import describe
from pipedream.capture.programs.divisible import divisible
from pipedream.capture.programs.draws import Draws
from pipedream.capture.programs.joint import Joint
from pipedream.capture.programs.localize import Redistribution, localize
from pipedream.capture.programs.program import Program
from pipedream.capture.programs.recomputing import recompute
from pipedream.capture.segment import segment
from pipedream.graph.cluster import Link
from pipedream.graph.placements.placement import Placements, Shard
from pipedream.graph.placements.requests import Requests
from pipedream.sharding.assignment import LinkedMesh
from pipedream.sharding.propagate import propagate


def labelled(whole: Captured) -> tuple[Joint, dict[str, Tensor]]:
    """The passes of the whole model, and its parameters and buffers."""
    piece = segment(whole, whole.working, keep=whole.outputs)
    state = {name: tensor.clone() for name, tensor in piece.state.items()}
    wants = [False for _ in piece.inputs]
    names = piece.module, piece.state, inputs_of(whole), wants, nullcontext()
    return GraphNodes.of(whole).joint(*names), state


def inputs_of(whole: Captured) -> list[Tensor]:
    """Other ones each time; of words, which are few."""
    shaped = [
        torch.empty(whole.values[name].shape, dtype=whole.values[name].dtype)
        for name in whole.inputs
    ]
    return [x.normal_() if x.is_floating_point() else x.random_(WORDS) for x in shaped]


def learned(
    whole: Captured, nodes: Collection[str], inputs: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor], int]:
    """Outputs, gradients, what is in parameters and buffers then, and the bytes saved."""
    torch.manual_seed(5)
    joint, state = labelled(whole)
    recompute(joint, nodes)
    program = Program(joint)
    outputs, saved = program.forward(state, inputs, program.draw())
    own = {tensor.untyped_storage().data_ptr() for tensor in (*state.values(), *inputs)}
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved.values()}
    size = sum(each for place, each in kept.items() if place not in own)
    tangents = [torch.ones_like(outputs[k]) * 1e-2 for k in joint.differentiable]
    _, kept_for_weights = program.backward(saved, tangents)
    return list(outputs), dict(program.weight_gradients(kept_for_weights)), state, size


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "model", ["Perceptron", "Fused", "Separate", "Recurrent", "VGG", "Convolutions", "resnet18"]
)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_gradients_are_those_of_one_run(model: str, seed: int | None) -> None:
    """Of all nodes, or some: with dropout, attention, batch norms that learn and an LSTM."""
    torch.manual_seed(3)
    whole = captured(model)
    draw = random.Random(seed)
    nodes = [node for node in whole.working if seed is None or draw.random() < 0.5]
    inputs = inputs_of(whole)
    plain, again = (learned(whole, which, inputs) for which in ((), nodes))
    assert plain[1].keys() == again[1].keys()
    for one, other in zip(plain[:3], again[:3], strict=True):
        pairs = zip(_values(one), _values(other), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    assert again[3] < plain[3] or seed is not None
    assert again[3] <= plain[3]


def _values(tensors: list[Tensor] | dict[str, Tensor]) -> list[Tensor]:
    return list(tensors.values()) if isinstance(tensors, dict) else tensors


class Counted(nn.Module):
    """What it computes from a buffer cannot be computed again once the buffer has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return torch.tanh(self.linear(x) * self.count).sin()


def test_what_reads_a_buffer_that_changes_is_kept() -> None:
    whole = capture(Counted(), (torch.randn(3, 4),))
    inputs = [torch.randn(3, 4)]
    plain, again = (learned(whole, which, inputs) for which in ((), whole.working))
    assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])
    assert torch.equal(plain[2]["count"], again[2]["count"])


def test_what_runs_again_runs_just_before_it_is_needed() -> None:
    """Of three sines after one another: each is made again when the backward pass is there.

    forward   a = sin x      b = sin a      c = sin b
    backward  a' b' | c's gradient needs cos b' | b's cos a' | a's cos x
    """

    class Sines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).sin().sin().sin()

    whole = capture(Sines(), (torch.randn(3, 4),))
    joint, _ = labelled(whole)
    recompute(joint, whole.working)
    names = [str(n.target).split(".")[1] for n in joint.module.graph.nodes if _computes(n)]
    forward, backward = names[:4], names[4:]
    assert forward == ["mul", "sin", "sin", "sin"]
    assert backward[:5] == ["mul", "sin", "sin", "cos", "mul"]
    assert backward.count("sin") == 2, "each is made again once"
    program = Program(joint)
    assert not set(program.parts.weights["scale"].needs) & set(joint.outputs)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.before(x).unflatten(-1, (3, 1, 4)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts.unbind(0))
        return self.after(attended.transpose(1, 2).flatten(2))


def test_attention_without_dropout_draws_nothing() -> None:
    """torch says that all attention draws: it was kept, though planned as if it ran again."""
    whole = capture(Attending(), (torch.randn(2, 5, 4),))
    joint, _ = labelled(whole)
    recompute(joint, whole.working)
    attentions = [n for n in joint.module.graph.nodes if "flash_attention_for_cpu" in n.name]
    assert sum("backward" not in node.name for node in attentions) == 2


def on_a_pair(model: nn.Module, x: Tensor, values: Mapping[str, Placements]) -> Joint:
    """The passes of one of two devices, all of whose nodes run again. Nothing is sent."""
    whole = capture(model, (x,))
    passes = divisible(labelled(whole)[0])
    linked = LinkedMesh((2,), (Link(bandwidth=1e9),))
    assignment = propagate(describe(passes), linked, Requests({}, values))
    local = localize(passes, assignment, 0, lambda tensor, *_: tensor)
    recompute(local, whole.working)
    return local


def test_what_reads_a_divided_batch_norm_runs_again() -> None:
    """Where the norm comes first, its input was taken for a buffer that it changes."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3))
    local = on_a_pair(model, torch.randn(4, 3, 6, 6), {"input 0": (Shard(0),)})
    nodes = local.module.graph.nodes
    assert sum(isinstance(n.target, DividedBatchNorm) for n in nodes) == 3, "one is backward"
    assert sum("relu" in str(node.target) for node in nodes) == 2


def test_what_only_copies_need_is_moved_again() -> None:
    """A value that is kept, read elsewhere in another placement: that copy was kept as well.

    x -> relu (kept) -> redistribute -> sin (again) -> cos (again)
    """
    graph = fx.Graph()
    x = graph.placeholder("x")
    kept = _operator(graph, torch.ops.aten.relu.default, "one", x)
    moved = graph.call_function(Redistribution(lambda local, *_: local, (2,), ()), (kept,))
    sine = _operator(graph, torch.ops.aten.sin.default, "two", moved)
    cosine = _operator(graph, torch.ops.aten.cos.default, "two", sine)
    tangent = graph.placeholder("tangent")
    gradient = _operator(graph, torch.ops.aten.mul.Tensor, "two", tangent, sine)
    graph.output([cosine, gradient])
    draws = Draws(fx.GraphModule(nn.Module(), fx.Graph()), [])
    module = fx.GraphModule(nn.Module(), graph)
    joint = Joint(module, {}, [x], draws, [tangent], (0,), [cosine], [gradient], {})
    recompute(joint, ["two"])
    names = [node.name for node in graph.nodes]
    assert names[names.index("tangent") + 1 :] == [
        "redistribute_1",
        "sin_default_1",
        "mul_tensor",
        "output",
    ]


def _operator(graph: fx.Graph, target: Any, node: str, *args: fx.Node) -> fx.Node:
    made = graph.call_function(target, args)
    made.meta["graph_node"] = (node, False)
    return made


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
