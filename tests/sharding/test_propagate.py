"""Divisions that follow from a few placements: literal small cases, and random graphs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from fnmatch import fnmatchcase

import pytest
import torch
from amount import examples
from divided import run_divided
from hypothesis import given, settings
from hypothesis import strategies as st
from joint_models import MODELS, FusedAttention, trace, traced_model
from random_operators import random_graph
from torch import Tensor, nn, randn

from pipedream.capture.programs.description import describe
from pipedream.graph.cluster import Link
from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import (
    OperatorCall,
    OperatorGraph,
)
from pipedream.graph.placements.placement import Replicate, parse_placements, show_placements
from pipedream.graph.placements.requests import Requests
from pipedream.sharding.assignment import (
    Assignment,
    LinkedMesh,
    Redistribution,
    redistributions,
)
from pipedream.sharding.propagate import propagate
from pipedream.sharding.rules import strategies
from pipedream.sharding.steps import Collective

LINK = Link(latency=1e-6, bandwidth=1e9)


def mesh(*sizes: int) -> LinkedMesh:
    return LinkedMesh(sizes, (LINK,) * len(sizes))


def requests(
    parameters: Mapping[str, str] | None = None,
    values: Mapping[str, str] | None = None,
    operators: Mapping[str, tuple[str, ...]] | None = None,
) -> Requests:
    return Requests(
        {name: parse_placements(text) for name, text in (parameters or {}).items()},
        {name: parse_placements(text) for name, text in (values or {}).items()},
        {n: tuple(map(parse_placements, texts)) for n, texts in (operators or {}).items()},
    )


def perceptron() -> OperatorGraph:
    """Two layers, whose output and its gradient are on all devices."""
    layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    return describe(trace(layers, (randn(16, 8),)).joint)


def moves(assignment: Assignment) -> list[Redistribution]:
    """Those that communicate."""
    return [each for each in redistributions(assignment) if each.bytes]


def collectives(assignment: Assignment, often: str = "minibatch") -> list[str]:
    moved = (each for each in moves(assignment) if each.often == often)
    return [f"{step.collective.value} on axis {step.axis}" for each in moved for step in each.steps]


def parameters(assignment: Assignment) -> dict[str, str]:
    given = (each for each in assignment.graph.inputs if each.role == "parameter")
    return {each.name: show_placements(assignment.placed[each.value]) for each in given}


def test_columns_and_then_rows_take_one_sum_forward_and_one_backward() -> None:
    """Shoeybi et al., Megatron-LM, 2019, figure 3."""
    asked = requests({"0.weight": "S(0)", "2.weight": "S(1)"})
    assignment = propagate(perceptron(), mesh(4), asked)
    assert collectives(assignment) == ["all-reduce on axis 0"] * 2
    assert collectives(assignment, "update") == []
    assert parameters(assignment)["0.bias"] == "S(0)"
    sent = sum(each.bytes for each in moves(assignment) if each.often == "minibatch")
    assert sent == 2 * 2 * 3 * 16 * 8 * 8 // 4


def test_a_divided_batch_takes_the_sums_of_the_gradients_alone() -> None:
    graph = describe(traced_model("mlp", means=False).joint)
    assignment = propagate(graph, mesh(2), requests(values={"input 0": "S(0)"}))
    assert collectives(assignment) == ["all-reduce on axis 0"], "of the loss, one number"
    assert collectives(assignment, "update") == ["all-reduce on axis 0"] * 4
    assert set(parameters(assignment).values()) == {"R"}


def test_both_at_once_on_two_axes() -> None:
    asked = requests({"0.weight": "R,S(0)", "2.weight": "R,S(1)"}, {"input 0": "S(0),R"})
    assignment = propagate(perceptron(), mesh(2, 4), asked)
    found = collectives(assignment)
    assert sorted(found) == [
        "all-gather on axis 0",  # the output
        "all-reduce on axis 1",
        "all-reduce on axis 1",
    ]
    assert set(collectives(assignment, "update")) == {"all-reduce on axis 0"}


def test_heads_are_divided_if_the_fused_projection_is() -> None:
    graph = describe(trace(FusedAttention(), (randn(4, 6, 12),)).joint)
    asked = requests({"qkv.weight": "S(0, chunks=3)", "out.weight": "S(1)"})
    seconds = {call.name: 1.0 for call in graph.calls}
    assignment = propagate(graph, mesh(2), asked, seconds)
    attention = [call for call in graph.calls if "attention" in call.operator.target]
    assert len(attention) == 2
    for call in attention:
        (strategy,) = assignment.strategies[call.name]
        assert {show_placements((each,)) for each in strategy.outputs} == {"S(1)"}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MODELS)
def test_without_requests_all_is_replicated(name: str) -> None:
    assignment = propagate(describe(traced_model(name).joint), mesh(2, 2), Requests())
    assert sum(each.seconds for each in redistributions(assignment)) == 0
    assert {each for placements in assignment.placed.values() for each in placements} == {
        Replicate()
    }


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MODELS)
def test_a_divided_batch_needs_no_more_than_gathering_everything(name: str) -> None:
    graph = describe(traced_model(name, means=False).joint)
    asked = requests(values={"input 0": "S(0),R"})
    assignment = propagate(graph, mesh(2, 2), asked)
    check(assignment, asked)


class NormOfCubes(nn.BatchNorm2d):
    """Gives one number, which depends on all that it normalizes."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) ** 3).sum()


def test_batch_norm_sums_its_statistics_over_the_axis_that_divides_the_batch() -> None:
    """Forward two sums of one number for each of its two channels, backward one of two numbers."""
    graph = describe(trace(NormOfCubes(4), (randn(16, 4, 16, 16),)).joint)
    asked = requests(values={"input 0": "S(0),S(1)"})
    rows = moves(propagate(graph, mesh(2, 2), asked))
    source, target = parse_placements("P,S(0)"), parse_placements("R,S(0)")
    sums = [row for row in rows if row.often == "minibatch" and row.source == source]
    assert [(row.value, row.bytes) for row in sums] == [
        ("native_batch_norm", 2 * 8),
        ("native_batch_norm", 2 * 8),
        ("native_batch_norm_backward", 2 * 2 * 8),
    ]
    for row in sums:
        (step,) = row.steps
        assert (row.target, step.collective, step.axis) == (target, Collective.ALL_REDUCE, 0)
    (loss,) = {row.value for row in rows if row.often == "minibatch"} - {r.value for r in sums}
    assert graph.types()[loss].shape == ()


def test_whole_running_statistics_do_not_decide_how_data_are_divided() -> None:
    """They are the first that batch norm is reached from, and it gathered its data."""
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), NormOfCubes(4))
    graph = describe(trace(layers, (randn(16, 3, 16, 16),)).joint)
    buffers = {"1.running_mean": "R", "1.running_var": "R"}
    assignment = propagate(graph, mesh(2), requests(buffers, {"input 0": "S(0)"}))
    assert set(collectives(assignment)) == {"all-reduce on axis 0"}


def test_few_data_over_a_slow_link_are_gathered_before_batch_norm() -> None:
    """One message for the data, in place of three for the sums."""
    graph = describe(trace(NormOfCubes(4), (randn(8, 4, 6, 6),)).joint)
    slow = LinkedMesh((2,), (Link(latency=1e-3, bandwidth=1e9),))
    assignment = propagate(graph, slow, requests(values={"input 0": "S(0)"}))
    assert collectives(assignment).count("all-gather on axis 0") == 1
    assert {row.value for row in moves(assignment)} <= graph.types().keys()


def test_the_time_of_operators_keeps_them_divided() -> None:
    """Else a small weight is gathered rather than a large sum made."""
    asked = requests({"2.weight": "S(1)"}, {"input 0": "R"})
    graph = perceptron()
    (last,) = [c.name for c in graph.calls if c.operator.family == "aten.addmm"][1:]
    free = propagate(graph, mesh(2), asked).strategies[last][0]
    timed = propagate(graph, mesh(2), asked, {last: 1.0}).strategies[last][0]
    assert show_placements(timed.inputs[1:]) in ("S(1),S(0)", "S(0),R", "R,S(1)")
    assert free == timed or "S" not in show_placements(free.inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            requests({"0.wieght": "S(0)"}),
            "parameters.0.wieght: no parameter has this name; did you mean 0.weight or 2.weight?",
        ),
        (
            requests({"0.weight": "S(2)"}),
            "parameters.0.weight: 0.weight of shape (32, 8) cannot be placed S(2): dimension 2 is "
            "sharded, but the tensor has 2: dimensions count from 0",
        ),
        (
            requests({"0.weight": "S(0, chunks=3)"}),
            "parameters.0.weight: 0.weight of shape (32, 8) cannot be placed S(0, chunks=3): 32 "
            "elements of dimension 0 are not 3 equal chunks on axis 0: choose chunks that divide "
            "them",
        ),
        (
            requests({"0.weight": "S(0),R"}),
            "parameters.0.weight: 0.weight of shape (32, 8) cannot be placed S(0),R: 2 placements "
            "for a mesh of 1 axes: give one for each axis",
        ),
        (
            requests({"0.weight": "P"}),
            "parameters.0.weight: P is a sum, which only operators can give: write R or S(0)",
        ),
        (
            requests(values={"gleu": "S(0)"}),
            "values.gleu: no value has this name; did you mean gelu?",
        ),
        (
            requests(values={"gelu": "P"}),
            "values.gelu: aten.gelu.default cannot give it P on axis 0: choose one of R | S(0) | "
            "S(1)",
        ),
        (
            requests(operators={"addmm": ("S(0)", "S(0)", "R")}),
            "operators.addmm: aten.addmm.default cannot be divided S(0),S(0),R on axis 0: choose "
            "one of P,P,R | P,R,P | P,S(1),S(0) | R,R,R | R,S(0),R | S(0),R,S(1)",
        ),
        (
            requests(operators={"addmm": ("R",)}),
            "operators.addmm: it reads 3 tensors, 1 have placements: give placements for each",
        ),
        (
            requests(operators={"adm": ("R",)}),
            "operators.adm: no operator has this name; did you mean addmm or addmm_1?",
        ),
    ],
)
def test_requests_that_cannot_be_met(asked: Requests, message: str) -> None:
    with pytest.raises(UserError) as caught:
        propagate(perceptron(), mesh(2), asked)
    assert str(caught.value) == message


MEGATRON = {
    "blocks.*.[qkv].weight": "R,S(0)",
    "blocks.*.qkv.weight": "R,S(0, chunks=3)",
    "blocks.*.out.weight": "R,S(1)",
    "blocks.*.up.weight": "R,S(0)",
    "blocks.*.down.weight": "R,S(1)",
    "network.conv1.weight": "R,S(0)",
    "network.layer1.0.conv2.weight": "R,S(1)",
    "network.features.0.weight": "R,S(0)",
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_devices_compute_together_what_one_does(name: str, timed: bool) -> None:
    """Batch and weights divided, on two axes, unevenly; all values of both passes."""
    traced = traced_model(name, means=False)
    graph = describe(traced.joint)
    names = [each.name for each in graph.inputs]
    patterns = {p: t for p, t in MEGATRON.items() if any(fnmatchcase(n, p) for n in names)}
    if name == "transformer, chunked":
        patterns["blocks.*.qkv.weight"] = "S(0, chunks=3),R"
    seconds = {call.name: 1e-3 for call in graph.calls} if timed else {}
    asked = requests(patterns, {"input 0": "S(0),R"})
    assignment = propagate(graph, mesh(2, 3) if timed else mesh(2, 2), asked, seconds)
    whole = propagate(graph, mesh(1), Requests())
    expected = run_divided(traced, whole)
    found = run_divided(traced, assignment)
    for value in expected.keys() - _nothing(graph):
        tensor = expected[value]
        assert torch.allclose(found[value], tensor, rtol=1e-9, atol=1e-11), value


def _nothing(graph: OperatorGraph) -> set[str | None]:
    """The values that are memory alone, such as what dropout is drawn into."""
    empty = (call for call in graph.calls if call.operator.family.startswith("aten.empty"))
    return {value for call in empty for value in call.results}


def check(assignment: Assignment, asked: Requests) -> None:
    """What was asked for is so; all strategies are ones; redistributions lead where they must."""
    graph, sizes = assignment.graph, assignment.mesh.sizes
    given_values = {f"{each.role} {each.name}": each.value for each in graph.inputs}
    by_name = {each.name: each.value for each in graph.inputs if each.role == "parameter"}
    for name, placements in asked.values.items():
        assert assignment.placed[given_values.get(name, name)] == placements
    for name, placements in asked.parameters.items():
        assert assignment.placed[by_name[name]] == placements
    for call in graph.calls:
        strategy = assignment.strategies[call.name][0]
        chunks = {
            each.chunks for each in (*strategy.inputs, *strategy.outputs) if hasattr(each, "chunks")
        }
        assert strategy in strategies(call.operator, sizes[0], tuple(chunks))
        for value, placements in zip(call.results, _outputs(assignment, call), strict=True):
            if value is not None:
                assert assignment.placed[value] == placements
    for each in redistributions(assignment):
        assert each.steps[0].source == each.source
        assert each.steps[-1].target == each.target


def _outputs(assignment: Assignment, call: OperatorCall) -> list[tuple[object, ...]]:
    return list(zip(*(each.outputs for each in assignment.strategies[call.name]), strict=True))


@settings(max_examples=examples(60), deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([(2,), (3,), (2, 2)]))
def test_random_graphs(rng: random.Random, sizes: tuple[int, ...]) -> None:
    graph = random_graph(rng)
    texts = ("R", "S(0)", "S(1)")
    asked = requests(
        {"w0": ",".join(rng.choice(texts) for _ in sizes)},
        {"x": ",".join(rng.choice(texts) for _ in sizes)},
    )
    assignment = propagate(graph, mesh(*sizes), asked)
    check(assignment, asked)
    assert propagate(graph, mesh(*sizes), asked) == assignment
