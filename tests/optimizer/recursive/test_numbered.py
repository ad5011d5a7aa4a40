"""Arrays of a graph say what the graph says by names, one value and one pair at a time."""

from __future__ import annotations

import random
from collections import defaultdict

import networkx as nx
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from joint_models import MODELS, traced_model
from random_operators import random_graph

from pipedream.capture.programs.description import describe
from pipedream.graph.placements.operators import OperatorGraph, StageInput, TensorType, flops
from pipedream.graph.placements.placement import Partial, Shard
from pipedream.optimizer.recursive.graph import HalvingGraph
from pipedream.optimizer.recursive.numbered import Lists
from pipedream.sharding.axis import AxisNode, reads, results
from pipedream.sharding.rules import strategies


def rows(lists: Lists) -> list[list[int]]:
    return [lists.items[b:e].tolist() for b, e in zip(lists.begin, lists.begin[1:], strict=False)]


def by_name(found: HalvingGraph, row: list[int]) -> list[str | None]:
    names: list[str | None] = [*found.values, None]  # which is the last one: -1
    return [names[number] for number in row]


def check(graph: OperatorGraph) -> None:
    found, nodes = HalvingGraph(graph), [*graph.inputs, *graph.calls]
    assert [by_name(found, row) for row in rows(found.reads)] == [list(reads(n)) for n in nodes]
    assert [by_name(found, row) for row in rows(found.results)] == [list(results(n)) for n in nodes]
    for value, number in found.values.items():
        node = nodes[found.producers[number]]
        assert (*reads(node), *results(node))[found.slots[number]] == value
    check_alike(found, nodes)
    check_neighbours(found, nodes)
    check_late(found)
    check_indices(found)


def check_alike(found: HalvingGraph, nodes: list[AxisNode]) -> None:
    seen = []
    for calls in found.alike:
        for node, row in zip(calls.nodes.tolist(), calls.values.tolist(), strict=True):
            call = found.graph.calls[node - len(found.graph.inputs)]
            assert call.operator == found.operators[calls.operator]
            assert by_name(found, row) == [*call.reads, *call.results]
            assert [number < 0 for number in row] == [n < 0 for n in calls.values[0].tolist()]
            seen.append(node)
    assert sorted(seen) == list(range(len(found.graph.inputs), len(nodes)))


def check_neighbours(found: HalvingGraph, nodes: list[AxisNode]) -> None:
    near: list[list[int]] = [[] for _ in nodes]
    pairs = [(n, found.values[value]) for n, node in enumerate(nodes) for value in reads(node)]
    for output in found.graph.outputs:
        for node, each in enumerate(found.graph.inputs):
            if (f"{each.role} gradient", each.name) == (output.role, output.name):
                pairs.append((node, found.values[output.value]))
    for one, value in pairs:
        near[one].append(int(found.producers[value]))
        near[found.producers[value]].append(one)
    assert rows(found.arrays.near) == near


def check_late(found: HalvingGraph) -> None:
    ends, readers = defaultdict(list), defaultdict(list)
    for output in found.graph.outputs:
        ends[output.value].append(output)
    for call in found.graph.calls:
        for value in call.reads:
            readers[value].append(call)
    parameters = {
        each.name: found.values[each.value]
        for each in found.graph.inputs
        if each.role == "parameter"
    }
    late: dict[str | None, int] = {}
    for value in reversed(found.values):  # whatever reads it gives others, which come after it
        own = [
            parameters[each.name] if each.role == "parameter gradient" else -1
            for each in ends[value]
        ]
        for call in readers[value]:
            made = [late[result] for result in call.results if result in late]
            sums = any(
                {*strategy.inputs, *strategy.outputs} == {Partial()}
                for strategy in strategies(call.operator, 2)
            )
            own.append(min(made) if sums and made else -1)
        if own:
            late[value] = min(own)
    assert found.arrays.late.tolist() == [late.get(value, -1) for value in found.values]


def check_indices(found: HalvingGraph) -> None:
    given, related = {each.value for each in found.graph.inputs}, nx.Graph()
    for call in found.graph.calls:
        if flops(call.operator) or len(set(call.reads) - given) <= 1:
            for strategy in strategies(call.operator, 2):
                ends = zip(
                    (*call.reads, *call.results), (*strategy.inputs, *strategy.outputs), strict=True
                )
                places = [
                    (found.values[value], placed.dim)
                    for value, placed in ends
                    if value is not None and isinstance(placed, Shard)
                ]
                related.add_edges_from((places[0], each) for each in places[1:])
    indices, numbers = found.arrays.indices, set()
    for component in nx.connected_components(related):
        (number,) = {int(indices[place]) for place in component}
        assert number >= 0
        assert number not in numbers
        numbers.add(number)
    assert (indices >= 0).sum() == len(related)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_of_models(name: str) -> None:
    check(describe(traced_model(name).joint))


@settings(max_examples=examples(60), deadline=None)
@given(st.randoms(use_true_random=False))
def test_of_random_graphs(rng: random.Random) -> None:
    check(random_graph(rng))


def test_of_no_operators() -> None:
    type_ = TensorType(shape=(4, 4), dtype="float32", element_bytes=4)
    given = StageInput(value="x", role="input", name="0", type=type_)
    check(OperatorGraph(inputs=(given,), calls=()))
    check(OperatorGraph(inputs=(), calls=()))


def test_lists_keep_the_order_of_their_items() -> None:
    lists = Lists.keyed([2, 0, 2, 0], [7, 5, 6, 4], 4)
    assert rows(lists) == [[5, 4], [], [7, 6], []]
    assert lists.owners.tolist() == [0, 0, 2, 2]
    assert lists.places.tolist() == [0, 1, 0, 1]
