"""The graph: its order, its neighbours, its fingerprint."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from pipedream.graph.model import Graph, Node, format_graph


def graph_of(names: str, *edges: str) -> Graph:
    """`graph_of("abc", "ab", "bc")`: nodes a, b and c, edges a -- b and b -- c."""
    nodes = {name: Node(name, name.upper()) for name in names}
    return Graph(nodes, tuple((edge[0], edge[1]) for edge in edges))


def test_order_is_topological_and_otherwise_that_of_the_file() -> None:
    assert graph_of("dcba", "ab", "ac", "bd", "cd").order == ("a", "c", "b", "d")
    assert graph_of("abcd").order == ("a", "b", "c", "d")
    with pytest.raises(nx.NetworkXUnfeasible):
        _ = graph_of("ab", "ab", "ba").order


def test_fingerprint_is_of_the_structure_alone() -> None:
    graph = graph_of("abc", "ab", "ac")
    slow = graph.with_nodes([replace(graph.nodes["b"], forward_seconds=1.0, stage=3)])
    assert slow.fingerprint == graph.fingerprint
    assert graph_of("abc", "ab", "bc").fingerprint != graph.fingerprint
    other = graph.with_nodes([replace(graph.nodes["b"], description="Other")])
    assert other.fingerprint != graph.fingerprint


def test_stages_are_those_named_and_no_others() -> None:
    graph = graph_of("abc", "ab", "bc").with_stages({"a": 0, "b": 1})
    assert [node.stage for node in graph.nodes.values()] == [0, 1, None]
    assert [n.stage for n in graph.with_stages({"c": 2}).nodes.values()] == [None, None, 2]
    assert graph.edges == (("a", "b"), ("b", "c"))


def test_the_gradients_of_inputs_take_what_was_measured_or_else_an_assumed_part() -> None:
    plain, linear = Node("a", "Add", 1.0, 2.0), Node("b", "Linear", 1.0, 2.0, parameter_bytes=8.0)
    measured = replace(linear, backward_input_share=0.3, kept_bytes=5.0)
    nodes = plain, replace(linear, id="c"), replace(measured, id="d")
    assert [node.backward_input_seconds for node in nodes] == pytest.approx([2.0, 1.0, 0.6])
    arrays = Graph({node.id: node for node in nodes}, ()).arrays
    assert arrays.backward_input.tolist() == [n.backward_input_seconds for n in nodes]
    assert np.array_equal(arrays.kept, [np.nan, np.nan, 5.0], equal_nan=True)


def test_the_text_has_no_place_for_halves() -> None:
    graph = graph_of("a")
    divided = graph.with_nodes([replace(graph.nodes["a"], backward_input_share=0.3, kept_bytes=5)])
    assert format_graph(divided) == format_graph(graph)
