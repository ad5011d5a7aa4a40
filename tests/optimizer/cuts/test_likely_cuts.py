from itertools import pairwise

import pytest

from pipedream.optimizer.cuts.antichains import all_downsets, bits
from pipedream.optimizer.cuts.frontier import bins_of
from pipedream.optimizer.cuts.likely_cuts import likely_downsets, prefixes
from pipedream.optimizer.cuts.planning_graph import PlanningGraph


def ladder(make_graph, branches, length):
    """`branches` chains of `length` between a first and a last node, listed breadth first."""
    names = [f"n{b}_{i}" for i in range(length) for b in range(branches)]
    edges = [f"n{b}_{i}-n{b}_{i + 1}" for i in range(length - 1) for b in range(branches)]
    edges += [f"first-n{b}_0" for b in range(branches)]
    edges += [f"n{b}_{length - 1}-last" for b in range(branches)]
    return PlanningGraph.of(make_graph(f"first {' '.join(names)} last", " ".join(edges)))


@pytest.mark.parametrize("limit", [5, 25, 50, 1000])
def test_prefixes_are_downsets_in_topological_order(make_graph, limit):
    graph = ladder(make_graph, 3, 3)
    found = prefixes(graph, limit)
    every = set(all_downsets(graph, 1000))
    assert found[0] == 0
    assert found[-1] == (1 << len(graph)) - 1
    assert set(found) <= every
    assert [downset.bit_count() for downset in found] == sorted(d.bit_count() for d in found)


def test_there_is_an_order_that_finishes_a_branch_and_one_that_follows_the_file(make_graph):
    graph = ladder(make_graph, 3, 3)
    found = {frozenset(graph.names[n] for n in bits(d)) for d in prefixes(graph, 30)}
    assert {"first", "n0_0", "n0_1", "n0_2"} in found
    assert {"first", "n0_0", "n1_0", "n2_0"} in found


def test_there_is_an_order_that_keeps_few_bytes_alive(make_graph):
    # Only by the file is the fat branch begun first, only by bytes the thin one finished first.
    graph = PlanningGraph.of(
        make_graph(
            "a fat thin end",
            "a-fat a-thin fat-end thin-end",
            fat=(1, 1e6, 0),
            thin=(1, 1, 0),
        )
    )
    found = {frozenset(graph.names[n] for n in bits(d)) for d in prefixes(graph, 7)}
    assert {"a", "thin"} in found
    assert {"a", "fat"} in found


def test_the_lightest_cuts_of_all_are_likely(make_graph):
    graph = ladder(make_graph, 3, 3)
    bins = bins_of(graph)
    found = likely_downsets(graph, bins, 60)
    assert set(found) >= set(prefixes(graph, 20)) | set(bins.merged(40).lightest)
    assert [downset.bit_count() for downset in found] == sorted(d.bit_count() for d in found)


def test_a_tensor_is_awaited_until_its_last_reader(make_graph):
    # After t and a: r leaves 10 bytes more, b leaves 18 more, for c is still to read a.
    costs = {"t": (1, 5, 0), "a": (1, 9, 0), "r": (1, 15, 0), "b": (1, 18, 0), "c": (1, 18, 0)}
    edges = "t-r a-b a-c r-end b-end c-end"
    graph = PlanningGraph.of(make_graph("a b t c r end", edges, **costs))
    found = {frozenset(graph.names[n] for n in bits(d)) for d in prefixes(graph, 18)}
    assert {"t", "a", "r"} in found


@pytest.mark.parametrize("limit", [2, 5, 10])
def test_of_too_many_the_lightest_are_kept(make_graph, limit):
    names = [f"n{i}" for i in range(40)]
    costs = {name: (1, 10 if i % 4 == 0 else 1000, 0) for i, name in enumerate(names)}
    edges = " ".join(f"{a}-{b}" for a, b in pairwise(names))
    graph = PlanningGraph.of(make_graph(" ".join(names), edges, **costs))
    found = prefixes(graph, limit)
    assert found[0] == 0
    assert found[-1] == (1 << 40) - 1
    assert len(found) <= limit + 2
    assert all((downset.bit_count() - 1) % 4 == 0 for downset in found[1:-1])
