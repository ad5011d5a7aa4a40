"""Divisions that nobody asked for: what is found in plain cases, and that all of them are right."""

from __future__ import annotations

import random
from fnmatch import fnmatchcase
from itertools import product

import pytest
import torch
from amount import examples
from divided import run_divided
from hypothesis import given, settings
from hypothesis import strategies as st
from joint_models import MODELS, trace, traced_model
from random_operators import random_graph
from torch import nn, randn

from pipedream.capture.programs.description import describe
from pipedream.graph.cluster import Link
from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import OperatorGraph, flops
from pipedream.graph.placements.placement import Partial, Shard, parse_placements, show_placements
from pipedream.graph.placements.requests import Requests
from pipedream.optimizer.recursive.search import RecursiveSearch, parts, recursive
from pipedream.sharding.assignment import Assignment, LinkedMesh, redistributions
from pipedream.sharding.axis import local_operators
from pipedream.sharding.propagate import propagate
from pipedream.sharding.rules import strategies

LINK = Link(latency=1e-6, bandwidth=1e9)


def mesh(*sizes: int) -> LinkedMesh:
    return LinkedMesh(sizes, (LINK,) * len(sizes))


def perceptron(batch: int, width: int = 32) -> OperatorGraph:
    layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    return describe(trace(layers, (randn(batch, width),)).joint)


def weights(assignment: Assignment) -> dict[str, str]:
    given_values = (each for each in assignment.graph.inputs if each.role == "parameter")
    return {each.name: show_placements(assignment.placed[each.value]) for each in given_values}


def sent(assignment: Assignment, often: str) -> int:
    return sum(each.bytes for each in redistributions(assignment) if each.often == often)


def total(assignment: Assignment) -> int:
    return sent(assignment, "minibatch") + sent(assignment, "update")


def check(assignment: Assignment) -> None:
    """All strategies are ones, after those of the axes before; values are as operators give them;
    what is changed in place stays.
    """
    sizes = assignment.mesh.sizes
    for call in assignment.graph.calls:
        chosen = assignment.strategies[call.name]
        for axis, strategy in enumerate(chosen):
            chunks = tuple({each.chunks for each in strategy.shards})
            for local in local_operators(call.operator, chosen[:axis], sizes):
                assert strategy in strategies(local, sizes[axis], chunks), call
        outputs = zip(*(each.outputs for each in chosen), strict=True)
        for value, placements in zip(call.results, outputs, strict=True):
            assert value is None or assignment.placed[value] == placements
        for number in call.operator.writes:
            assert assignment.placed[call.reads[number]] == assignment.targets(call.name)[number]
    for each in assignment.graph.inputs:
        assert Partial() not in assignment.placed[each.value]
        if each.role not in ("parameter", "buffer"):
            assert set(show_placements(assignment.placed[each.value])) <= {"R", ","}
    for moved in redistributions(assignment):
        assert moved.steps[-1].target == moved.target


def test_columns_and_then_rows_where_the_batch_is_small() -> None:
    """Shoeybi et al., Megatron-LM, 2019, figure 3: one sum forward, one backward."""
    assignment = recursive(perceptron(batch=4), mesh(4))
    found = weights(assignment)
    assert (found["0.weight"], found["0.bias"], found["2.weight"]) == ("S(0)", "S(0)", "S(1)")
    assert sent(assignment, "update") == 0


def test_the_batch_is_divided_where_it_is_large() -> None:
    """And no more is sent than where a user divides the batch. (Weights may come in parts, each of
    which is gathered once and gets its part of the sum: as many bytes as one sum of all.)
    """
    graph = perceptron(batch=4096)
    assignment = recursive(graph, mesh(4))
    for call in graph.calls:
        if flops(call.operator):
            (strategy,) = assignment.strategies[call.name]
            batch = [4096 in type_.shape for type_ in call.operator.inputs]
            placed = zip(batch, call.operator.inputs, strategy.inputs, strict=True)
            for divided, type_, its in placed:
                assert not divided or its == Shard(type_.shape.index(4096))
    ends = {f"{each} 0": parse_placements("R") for each in ("input", "tangent")}
    asked = Requests({"*": parse_placements("R")}, {**ends, "gelu": parse_placements("S(0)")})
    seconds = {call.name: 1.0 for call in graph.calls if flops(call.operator)}
    by_user = propagate(graph, mesh(4), asked, seconds)
    assert total(assignment) <= total(by_user)


def test_both_where_that_is_cheapest() -> None:
    """The first halvings of a middling batch leave so little of it that the weights are next."""
    graph = perceptron(batch=256)
    assignment = recursive(graph, mesh(2, 2, 2, 2))
    first = next(call for call in graph.calls if flops(call.operator))
    *_, (rows, columns) = parts(first, assignment)
    assert rows > 1
    assert columns > 1
    assert rows * columns == 16


def test_each_halving_divides_every_product_once_more() -> None:
    graph = perceptron(batch=16)
    search = RecursiveSearch(graph)
    for halvings in (1, 3, 5):
        assignment = search.run(mesh(*(2,) * halvings))
        check(assignment)
        for call in graph.calls:
            if flops(call.operator):
                divided = [
                    strategy for strategy in assignment.strategies[call.name] if strategy.shards
                ]
                assert len(divided) == halvings


def one_layer(batch: int, width: int, out: int) -> OperatorGraph:
    return describe(trace(nn.Linear(width, out, bias=False), (randn(batch, width),)).joint)


def forward_product(assignment: Assignment) -> list[bool]:
    """Whether each axis divides it."""
    call = next(call for call in assignment.graph.calls if flops(call.operator))
    return [bool(strategy.shards) for strategy in assignment.strategies[call.name]]


def test_what_saves_less_than_it_sends_stays_whole() -> None:
    graph = one_layer(4, 32, 32)
    for seconds, divided in ((1e-12, False), (1.0, True)):
        of_calls = {call.name: seconds for call in graph.calls}
        assert forward_product(recursive(graph, mesh(4), seconds=of_calls)) == [divided]


def test_each_axis_has_the_price_of_its_link() -> None:
    graph = one_layer(4, 32, 32)
    seconds = {call.name: 1e-6 for call in graph.calls}
    cheap, dear = Link(bandwidth=1e15), Link(bandwidth=1.0)
    for links in ((cheap, dear), (dear, cheap)):
        assignment = recursive(graph, LinkedMesh((2, 2), links), seconds=seconds)
        assert forward_product(assignment) == [link == cheap for link in links]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (3,), (2, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_all_strategies_are_ones(name: str, sizes: tuple[int, ...]) -> None:
    check(recursive(describe(traced_model(name, means=False).joint), mesh(*sizes)))


REQUESTS = {
    "mlp": ("down.weight", "S(0)"),
    "transformer, fused": ("blocks.*.qkv.weight", "S(0, chunks=3)"),
    "transformer, chunked": ("words.weight", "S(1)"),
    "transformer, separate": ("blocks.1.up.weight", "R"),
    "vgg": ("features.0.weight", "S(0)"),
    "resnet18": ("*.running_mean", "R"),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MODELS)
def test_requests_are_kept(name: str) -> None:
    graph = describe(traced_model(name, means=False).joint)
    pattern, text = REQUESTS[name]
    names = [e.name for e in graph.inputs if e.role in ("parameter", "buffer")]
    pattern = next(p for p in (f"network.{pattern}", f"*{pattern}", pattern) if _matches(names, p))
    wanted = parse_placements(f"{text},R")
    asked = Requests({pattern: wanted})
    assignment = recursive(graph, mesh(2, 2), asked)
    check(assignment)
    given_values = {e.name: e.value for e in graph.inputs if e.role in ("parameter", "buffer")}
    matching = [each for each in names if _matches([each], pattern)]
    assert matching
    assert {assignment.placed[given_values[each]] for each in matching} == {wanted}


def _matches(names: list[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("sizes", [(2, 2), (3,)])
@pytest.mark.parametrize("name", MODELS)
def test_devices_compute_together_what_one_does(name: str, sizes: tuple[int, ...]) -> None:
    """All values of both passes."""
    traced = traced_model(name, means=False)
    graph = describe(traced.joint)
    assignment = recursive(graph, mesh(*sizes))
    expected = run_divided(traced, propagate(graph, mesh(1), Requests()))
    found = run_divided(traced, assignment)
    empty = {v for c in graph.calls if "empty" in c.operator.family for v in c.results}
    for value in expected.keys() - empty:
        assert torch.allclose(found[value], expected[value], rtol=1e-9, atol=1e-11), value


@settings(max_examples=examples(60), deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from([(2,), (3,), (2, 2), (4, 2)]),
    st.booleans(),
)
def test_random_graphs(rng: random.Random, sizes: tuple[int, ...], timed: bool) -> None:
    graph = random_graph(rng)
    seconds = {call.name: rng.random() * 1e-6 for call in graph.calls} if timed else {}
    texts = ("R", "S(0)", "S(1)")
    wanted = parse_placements(",".join(rng.choice(texts) for _ in sizes))
    asked = Requests({"w0": wanted}, {"x": parse_placements(",".join("R" for _ in sizes))})
    assignment = recursive(graph, mesh(*sizes), asked, seconds)
    check(assignment)
    assert assignment.placed["w0"] == wanted
    assert recursive(graph, mesh(*sizes), asked, seconds) == assignment


@settings(max_examples=examples(30), deadline=None)
@given(st.tuples(*[st.sampled_from([8, 16, 64, 256])] * 3))
def test_one_layer_costs_little_more_than_the_best_of_all_ways(sizes: tuple[int, ...]) -> None:
    """A product and those that give its gradients, in all combinations of their strategies."""
    graph = one_layer(*sizes)
    whole = parse_placements("R")
    ends = {f"{e.role} {e.name}": whole for e in graph.inputs if e.role != "parameter"}
    products = [call for call in graph.calls if flops(call.operator)]
    options = [[s for s in strategies(call.operator, 2) if s.shards] for call in products]
    costs = []
    for choice, placed in product(product(*options), ("R", "S(0)", "S(1)")):
        chosen = zip(products, choice, strict=True)
        operators = {call.name: tuple((each,) for each in s.inputs) for call, s in chosen}
        asked = Requests({"*": parse_placements(placed)}, ends, operators)
        costs.append(total(propagate(graph, mesh(2), asked)))
    assert total(recursive(graph, mesh(2))) <= 1.25 * min(costs)


def test_requests_that_cannot_be_met() -> None:
    graph = perceptron(batch=4)
    with pytest.raises(UserError, match=r"^parameters\.0\.wieght: no parameter has this name"):
        recursive(graph, mesh(2), Requests({"0.wieght": parse_placements("S(0)")}))
    name = graph.calls[0].name
    with pytest.raises(UserError, match=rf"^operators\.{name}: this search takes placements of"):
        recursive(graph, mesh(2), Requests(operators={name: ()}))
    with pytest.raises(UserError, match=r"^values\.gelu: this search takes placements of"):
        recursive(graph, mesh(2), Requests(values={"gelu": parse_placements("S(0)")}))


def test_parts_are_those_of_all_axes() -> None:
    graph = perceptron(batch=4)
    assignment = recursive(graph, mesh(2, 4))
    for call in graph.calls:
        types = (*call.operator.inputs, *call.operator.outputs)
        for type_, counts in zip(types, parts(call, assignment), strict=True):
            assert type_ is not None
            assert len(counts) == len(type_.shape)
            assert all(size >= count for size, count in zip(type_.shape, counts, strict=True))
    first = next(call for call in graph.calls if flops(call.operator))
    assert parts(first, assignment) == ((8,), (1, 1), (1, 8), (1, 8))
