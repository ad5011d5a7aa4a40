"""Operators in layers, against every way to make them."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from amount import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipedream.graph.model import Graph, Node
from pipedream.optimizer.cuts.layering import SPREAD, layer_downsets, layers
from pipedream.optimizer.cuts.planning_graph import PlanningGraph


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 9))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=20)) if pairs else []
    nodes = {
        f"n{i}": Node(
            id=f"n{i}",
            description="Layer",
            forward_seconds=float(draw(st.integers(0, 9))),
            activation_bytes=(float(draw(st.integers(0, 5))),),
        )
        for i in range(count)
    }
    return Graph(nodes, tuple((f"n{a}", f"n{b}") for a, b in sorted(chosen)))


def received(graph, layer, before):
    """Bytes that the nodes of a layer read from those before it, each tensor once."""
    sources = {a for a, b in graph.edges if b in layer and a in before}
    return sum(graph.nodes[name].output_bytes for name in sources)


def best_by_hand(graph, count, cap):
    """(bytes of the layer that receives most, variance): the least of all contiguous layers."""
    names, scores = graph.order, []
    for ends in combinations(range(1, len(names)), count - 1):
        pieces = [names[a:b] for a, b in pairwise([0, *ends, len(names)])]
        work = [sum(graph.nodes[n].compute_seconds for n in piece) for piece in pieces]
        if all(len(p) == 1 or w <= cap for p, w in zip(pieces, work, strict=True)):
            begins = [0, *ends]
            most = max(received(graph, p, names[:b]) for p, b in zip(pieces, begins, strict=True))
            scores.append((most, float(np.var(work))))
    return min(scores, default=None)


@settings(max_examples=examples(300), deadline=None)
@given(graph=graphs(), count=st.integers(1, 9))
def test_equals_every_contiguous_partition_tried(graph, count):
    planning = PlanningGraph.of(graph)
    count = min(count, len(planning))
    total = float(planning.compute_seconds.sum())
    spread, best = SPREAD, None
    while best is None:
        best = best_by_hand(graph, count, (1 + spread) * total / count * (1 + 1e-9))
        spread = 2 * spread + 1
    ends = layers(planning, range(len(planning)), count)
    assert len(ends) == count
    pieces = [graph.order[a:b] for a, b in pairwise([0, *ends])]
    assert all(pieces)
    most = max(received(graph, p, graph.order[: graph.order.index(p[0])]) for p in pieces)
    work = [sum(graph.nodes[n].compute_seconds for n in piece) for piece in pieces]
    assert most == best[0]
    assert np.var(work) == pytest.approx(best[1])


def test_layers_avoid_the_wide_places(make_graph):
    # The tensors of b and d are large: the layers end after a, c and e.
    wide = {"b": (1, 900, 0), "d": (1, 900, 0)}
    graph = PlanningGraph.of(make_graph("a b c d e f", "a-b b-c c-d d-e e-f", **wide))
    assert layers(graph, range(6), 3) == (1, 3, 6) or layers(graph, range(6), 3) == (3, 5, 6)


def test_layers_are_even_where_all_places_are_alike(make_graph):
    graph = PlanningGraph.of(make_graph("a b c d e f", "a-b b-c c-d d-e e-f"))
    assert layers(graph, range(6), 3) == (2, 4, 6)


def test_cuts_of_several_orders_are_downsets_in_order(make_graph):
    graph = PlanningGraph.of(make_graph("a b c d", "a-b a-c b-d c-d"))
    cuts = layer_downsets(graph, [(0, 1, 2, 3), (0, 2, 1, 3)], 4)
    assert cuts == (0b0, 0b1, 0b11, 0b101, 0b111, 0b1111)


@given(graph=graphs(), count=st.integers(1, 4))
def test_every_cut_is_a_downset(graph, count):
    planning = PlanningGraph.of(graph)
    assume(len(planning) > 1)
    for cut in layer_downsets(planning, [range(len(planning))], count):
        for node, inputs in enumerate(planning.producer_masks):
            assert not cut >> node & 1 or not inputs & ~cut
