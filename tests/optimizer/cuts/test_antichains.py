import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.graph.model import Graph, Node
from pipedream.optimizer.cuts.antichains import all_downsets, bits, ready
from pipedream.optimizer.cuts.planning_graph import PlanningGraph


@pytest.fixture
def diamond(make_graph):
    r"""
      a       s
     / \     /
    b   c   /
     \ /   /
      d --+
    """
    return PlanningGraph.of(make_graph("a s b c d", "a-b a-c b-d c-d s-d"))


def named(graph, downset):
    return "".join(graph.names[node] for node in bits(downset))


def test_downsets_of_a_diamond_with_a_second_source(diamond):
    downsets = all_downsets(diamond, 100)
    assert [named(diamond, downset) for downset in downsets] == [
        *("", "a", "s", "as", "ab", "ac", "asb", "asc", "abc", "asbc", "asbcd")
    ]


def test_edges_add_one_node(diamond):
    downsets = all_downsets(diamond, 100)
    edges = {
        (named(diamond, downset), named(diamond, downset | 1 << node))
        for downset in downsets
        for node in bits(ready(diamond, downset))
    }
    assert edges == {
        ("", "a"),
        ("", "s"),
        ("a", "as"),
        ("a", "ab"),
        ("a", "ac"),
        ("s", "as"),
        ("as", "asb"),
        ("as", "asc"),
        ("ab", "asb"),
        ("ab", "abc"),
        ("ac", "asc"),
        ("ac", "abc"),
        ("asb", "asbc"),
        ("asc", "asbc"),
        ("abc", "asbc"),
        ("asbc", "asbcd"),
    }


def test_too_many_downsets_are_given_up(diamond):
    assert all_downsets(diamond, 10) is None
    assert len(all_downsets(diamond, 11)) == 11


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7))))
def test_downsets_are_all_sets_that_hold_their_producers(by_hand, count, pairs):
    edges = {(a, b) for a, b in pairs if a < b < count}
    nodes = {str(i): Node(str(i), "Linear()") for i in range(count)}
    graph = Graph(nodes, tuple((str(a), str(b)) for a, b in sorted(edges)))
    planning = PlanningGraph.of(graph)
    downsets = all_downsets(planning, 1000)
    found = [frozenset(planning.names[n] for n in bits(downset)) for downset in downsets]
    assert len(found) == len(set(found))
    assert set(found) == set(by_hand.downsets(graph))
    assert [len(downset) for downset in found] == sorted(map(len, found))


def test_published_profiles_have_as_many_downsets_as_recorded(expected, profile):
    recorded = {case["profile"]: case["downsets"] for case in expected["cases"]}
    assert recorded
    for name, count in recorded.items():
        downsets = all_downsets(PlanningGraph.of(profile(name)), 20_000)
        assert len(downsets) == count, name
