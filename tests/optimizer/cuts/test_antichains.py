import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.graph.model import Graph, Node
from pipedream.optimizer.cuts.antichains import AntichainDag, bits
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
    dag = AntichainDag.of(diamond, 100)
    assert [named(diamond, downset) for downset in dag.downsets] == [
        *("", "a", "s", "as", "ab", "ac", "asb", "asc", "abc", "asbc", "asbcd")
    ]


def test_antichains_are_the_frontiers_of_the_downsets(diamond):
    dag = AntichainDag.of(diamond, 100)
    found = {named(diamond, d): dag.antichain(i) for i, d in enumerate(dag.downsets)}
    assert found["as"] == ("a", "s")
    assert found["ab"] == ("b",)
    assert found["asbc"] == ("s", "b", "c")
    assert found["asbcd"] == ("d",)
    assert found[""] == ()


def test_augmented_antichains_add_what_is_yet_to_be_read(diamond):
    dag = AntichainDag.of(diamond, 100)
    found = {named(diamond, d): dag.augmented_antichain(i) for i, d in enumerate(dag.downsets)}
    assert found["ab"] == ("a", "b")  # c is still to read a
    assert found["abc"] == ("b", "c")
    assert found["asbcd"] == ("d",)


def test_edges_add_one_node(diamond):
    dag = AntichainDag.of(diamond, 100)
    edges = {
        (named(diamond, dag.downsets[a]), named(diamond, dag.downsets[b])) for a, b in dag.edges
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
    assert AntichainDag.of(diamond, 10) is None
    assert len(AntichainDag.of(diamond, 11).downsets) == 11


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7))))
def test_downsets_are_all_sets_that_hold_their_producers(by_hand, count, pairs):
    edges = {(a, b) for a, b in pairs if a < b < count}
    nodes = {str(i): Node(str(i), "Linear()") for i in range(count)}
    graph = Graph(nodes, tuple((str(a), str(b)) for a, b in sorted(edges)))
    planning = PlanningGraph.of(graph)
    dag = AntichainDag.of(planning, 1000)
    found = [frozenset(planning.names[n] for n in bits(downset)) for downset in dag.downsets]
    assert len(found) == len(set(found))
    assert set(found) == set(by_hand.downsets(graph))
    assert [len(downset) for downset in found] == sorted(map(len, found))


def test_published_profiles_have_as_many_downsets_as_recorded(expected, profile):
    recorded = {case["profile"]: case["downsets"] for case in expected["cases"]}
    assert recorded
    for name, count in recorded.items():
        dag = AntichainDag.of(PlanningGraph.of(profile(name)), 20_000)
        assert len(dag.downsets) == count, name
