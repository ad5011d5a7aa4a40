"""Groups of nodes that a plan keeps whole, and planning on them."""

from __future__ import annotations

from collections.abc import Mapping

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import graphs

from pipedream.graph.cluster import Cluster
from pipedream.graph.model import Graph, Node
from pipedream.graph.placements.operator_class import OperatorClass, class_of_layer
from pipedream.graph.placements.operators import Input, Operator, TensorType
from pipedream.optimizer.cost.models import PaperCost
from pipedream.optimizer.cuts.antichains import all_downsets, bits
from pipedream.optimizer.cuts.groups import fusion_groups, whole_modules
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request
from pipedream.sharding.operator_class import class_of

KINDS = {
    "c": OperatorClass.COMPLICATED,
    "n": OperatorClass.ONE_TO_MANY,
    "e": OperatorClass.ONE_TO_ONE,
    "z": OperatorClass.INDEPENDENT,
}
"""By the first letter of a node: convolution, norm, elementwise, zeros."""


def drawn(edges: str) -> tuple[Graph, Mapping[str, OperatorClass]]:
    """From `c1-e1 e1-n1 ...`."""
    pairs = tuple((a, b) for a, _, b in (each.partition("-") for each in edges.split()))
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    nodes = {name: Node(id=name, description=name) for name in names}
    return Graph(nodes, pairs), {name: KINDS[name[0]] for name in names}


@pytest.mark.parametrize(
    ("edges", "groups"),
    [
        # what follows a convolution goes with it
        ("c1-n1 n1-e1 e1-c2 c2-n2 n2-e2", "c1 n1 e1, c2 n2 e2"),
        # one convolution that three operators read, which one joins again: all one
        ("c1-e1 c1-e2 c1-e3 e1-e4 e2-e4 e3-e4", "c1 e1 e2 e3 e4"),
        # a residual block: its end is read twice, and begins nothing
        (
            "e0-c1 c1-n1 n1-e1 e1-c2 c2-n2 n2-e2 e0-e2 e2-c3",
            "e0, c1 n1 e1, c2 n2 e2, c3",
        ),
        # two independent branches: each convolution has one, the sum goes with the later one
        ("e0-c1 c1-e1 e0-c2 c2-e2 e1-e3 e2-e3", "e0, c1 e1, c2 e2 e3"),
        # an elementwise operator that a convolution alone reads goes before it
        ("c0-e0 c0-e1 e0-c1 e1-c2 c1-e2 c2-e2", "c0, e0 c1, e1 c2 e2"),
        # power<2>, broadcast, add: computed where it is read
        ("e1-n1 n1-e2 z1-e2", "e1 n1 z1 e2"),
        # two outputs
        ("c1-e1 c1-e2", "c1, e1, e2"),
    ],
)
def test_groups_as_drawn(edges: str, groups: str) -> None:
    graph, classes = drawn(edges)
    found = fusion_groups(PlanningGraph.of(graph), classes)
    assert {frozenset(own) for own in found} == {frozenset(g.split()) for g in groups.split(", ")}


@given(st.data(), graphs(most=12))
def test_groups_can_be_computed_one_after_the_other(data: st.DataObject, graph: Graph) -> None:
    kinds = st.sampled_from(list(OperatorClass))
    classes = {name: data.draw(kinds) for name in graph.nodes}
    groups = fusion_groups(PlanningGraph.of(graph), classes)
    assert sorted(name for own in groups for name in own) == sorted(graph.nodes)
    of_node = {name: number for number, own in enumerate(groups) for name in own}
    crossing = [(a, b) for a, b in graph.edges if of_node[a] != of_node[b]]
    assert nx.is_directed_acyclic_graph(nx.DiGraph((of_node[a], of_node[b]) for a, b in crossing))
    assert all(a == groups[of_node[a]][-1] for a, _ in crossing), "only an exit is read outside"
    for own in groups:
        assert [classes[name] for name in own].count(OperatorClass.COMPLICATED) <= 1
    plain, grouped = PlanningGraph.of(graph), PlanningGraph.of(graph, groups=groups)
    allowed = all_downsets(plain, 10_000) or ()
    for downset in all_downsets(grouped, 10_000) or ():
        names = [name for place in bits(downset) for name in grouped.members[place]]
        assert sum(1 << plain.position[name] for name in names) in allowed


@settings(deadline=None)
@given(graphs(most=8), st.data())
def test_plans_of_groups_are_plans_of_operators(graph: Graph, data: st.DataObject) -> None:
    """Never better than the best of these, whole in each group, and priced alike."""
    kinds = st.sampled_from(list(OperatorClass))
    classes = {name: data.draw(kinds) for name in graph.nodes}
    groups = fusion_groups(PlanningGraph.of(graph), classes)
    request = Request(graph, Cluster(machines=(3,), bandwidth=(1e8,)), PaperCost(), optimizer="sgd")
    best = optimize(request).plan
    plan = optimize(Request(**{**vars_of(request), "groups": groups})).plan
    assert sorted(plan.stage_of) == sorted(graph.nodes)
    assert all(len({plan.stage_of[name] for name in own}) == 1 for own in groups)
    seconds = plan.predicted.seconds_per_minibatch
    assert seconds >= best.predicted.seconds_per_minibatch * (1 - 1e-9)
    if all(len(own) == 1 for own in groups):
        assert seconds == pytest.approx(best.predicted.seconds_per_minibatch)


def test_an_output_that_nobody_reads_stays_with_what_gives_it() -> None:
    """A model that returns the first output of an LSTM: its group ended in a node that no plan
    divides, and planning ended in a KeyError.
    """
    names = {"a": "Linear(4, 4)", "b": "LSTM(4, 4)", "c": "__getitem__(0)"}
    nodes = {n: Node(id=n, description=d, forward_seconds=1e-3) for n, d in names.items()}
    graph = Graph(nodes, (("a", "b"), ("b", "c")))
    plain = PlanningGraph.of(graph)
    groups = fusion_groups(plain, {n: class_of_layer(d) for n, d in names.items()})
    assert groups == (("a",), ("b",))
    grouped = PlanningGraph.of(graph, groups=groups)
    assert grouped.stage_of([[0], [1]]) == {"a": 0, "b": 1, "c": 1}


def vars_of(request: Request) -> dict[str, object]:
    kept = "graph", "cluster", "model", "optimizer"
    return {name: getattr(request, name) for name in kept}


def test_classes_of_operators() -> None:
    def made(target: str, *shapes: tuple[int, ...], gives: tuple[int, ...]) -> Operator:
        inputs = tuple(TensorType(shape=s, dtype="float32", element_bytes=4) for s in shapes)
        output = TensorType(shape=gives, dtype="float32", element_bytes=4)
        numbers = tuple(Input(input=number) for number in range(len(shapes)))
        return Operator(target=target, arguments=numbers, inputs=inputs, outputs=(output,))

    square = (8, 8)
    assert class_of(made("aten.add.Tensor", square, square, gives=square)).words == "one-to-one"
    assert class_of(made("aten.add.Tensor", square, (8, 1), gives=square)).words == "one-to-one"
    assert class_of(made("aten.expand.default", (8, 1), gives=square)).words == "one-to-many"
    assert class_of(made("aten._softmax.default", square, gives=square)).words == "one-to-many"
    assert class_of(made("aten.mm.default", square, square, gives=square)).words == "complicated"
    assert class_of(made("mine.own.default", square, gives=square)).words == "complicated"
    assert class_of(made("aten.zeros.default", gives=square)).words == "independent"


def test_classes_of_layers() -> None:
    """As graph.txt of any age has them."""
    said = {"Conv2d(3, 64)": 3, "BatchNorm2d(64)": 2, "ReLU(inplace)": 1, "Add": 1, "LSTM(4)": 3}
    said |= {"__getitem__(0)": 1, "Whatever": 3, "Softmax(dim=-1)": 2, "": 3}
    assert {text: class_of_layer(text) for text in said} == said


def test_blocks_that_are_read_in_several_places_are_not_kept_whole() -> None:
    """Of an HRNet, whose stages give a value for each resolution: what read all but the last one
    was lost, and the graph to plan ended there.
    """
    graph, _ = drawn("c1-e1 c1-e2 e1-e3 e2-e4 e3-e5 e4-e5")
    modules = {"c1": "stem.0.conv", "e1": "stages.0.a", "e2": "stages.0.b"}
    modules |= {"e3": "heads.0.a", "e4": "heads.1.a", "e5": "last"}
    planning = PlanningGraph.of(graph)
    assert whole_modules(planning, modules) == tuple(
        (n,) for n in ("c1", "e1", "e2", "e3", "e4", "e5")
    )
    one_exit = {**modules, "e3": "stages.0.c", "e4": "stages.0.c", "e5": "stages.0.c"}
    assert whole_modules(planning, one_exit) == (("c1",), ("e1", "e2", "e3", "e4", "e5"))
    with pytest.raises(AssertionError, match="several exits"):
        PlanningGraph.of(graph, groups=(("e1", "e2"),))
