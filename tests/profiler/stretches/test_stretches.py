"""Stretches of about equal time, cut where little crosses."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pipedream.graph.model import Graph, Node
from pipedream.profiler.stretches.division import stretches


def chain(sizes: list[float]) -> Graph:
    """One node after another, a0 to a1 and so on, with outputs of these bytes."""
    nodes = {f"a{i}": Node(f"a{i}", "x", activation_bytes=(size,)) for i, size in enumerate(sizes)}
    names = list(nodes)
    return Graph(nodes, tuple(itertools.pairwise(names)))


def test_equal_nodes_are_divided_evenly() -> None:
    graph = chain([8.0] * 6)
    seconds = dict.fromkeys(graph.nodes, 1.0)
    found = stretches(graph, list(graph.nodes), seconds, 3)
    assert found == [["a0", "a1"], ["a2", "a3"], ["a4", "a5"]]


def test_a_cut_moves_to_where_few_bytes_cross() -> None:
    graph = chain([8.0, 8.0, 8.0, 8.0, 1.0, 8.0, 8.0, 8.0, 8.0, 8.0])
    seconds = dict.fromkeys(graph.nodes, 1.0)
    first, second = stretches(graph, list(graph.nodes), seconds, 2)
    assert (first[-1], second[0]) == ("a4", "a5")
    graph = chain([8.0, 1.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0])
    first, _ = stretches(graph, list(graph.nodes), seconds, 2)
    assert len(first) in (4, 5, 6), "but no farther than a quarter of a stretch"


def test_a_skip_counts_for_as_long_as_it_lives() -> None:
    graph = chain([100.0, *[1.0] * 9])
    graph = Graph(graph.nodes, (*graph.edges, ("a0", "a5")))
    seconds = dict.fromkeys(graph.nodes, 1.0)
    first, _ = stretches(graph, list(graph.nodes), seconds, 2)
    assert first[-1] == "a5", "before it the 100 bytes still cross"


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=12),
    st.integers(1, 6),
)
def test_all_nodes_are_there_once_and_in_order(
    drawn: list[tuple[float, float]], count: int
) -> None:
    graph = chain([size for size, _ in drawn])
    seconds = {name: time for name, (_, time) in zip(graph.nodes, drawn, strict=True)}
    found = stretches(graph, list(graph.nodes), seconds, count)
    assert [name for each in found for name in each] == list(graph.nodes)
    assert all(found)
    assert len(found) <= count
