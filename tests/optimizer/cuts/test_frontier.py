"""The lightest cuts by compute, against all downsets of small graphs, one by one."""

import numpy as np
import pytest
from amount import examples
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from random_graphs import graphs

from pipedream.optimizer.cuts.antichains import all_downsets
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.frontier import bins_of
from pipedream.optimizer.cuts.planning_graph import PlanningGraph


def all_cuts(graph):
    downsets = all_downsets(graph, 5000)
    if downsets is None:
        reject()
    return Cuts(graph, downsets)


def admits(bins, cuts, index):
    """The bins that this downset may be in."""
    seconds, parameters = cuts.seconds[index], cuts.parameter_bytes[index]
    fits = (bins.least_seconds <= seconds + 1e-12) & (seconds <= bins.most_seconds + 1e-12)
    fits &= (bins.least_parameters <= parameters) & (parameters <= bins.most_parameters)
    return fits & (bins.bytes_across <= cuts.bytes_across[index])


@settings(max_examples=examples(150), deadline=None)
@given(graph=graphs(), work=st.sampled_from([1, 1e4, 1e7]), most=st.sampled_from([3, 5, 30, 5000]))
def test_every_downset_is_within_a_bin(graph, work, most):
    graph = PlanningGraph.of(graph)
    cuts, bins = all_cuts(graph), bins_of(graph, work)
    for some in (bins, bins.merged(most)):
        assert all(admits(some, cuts, index).any() for index in range(len(cuts)))
    assert len(bins.merged(most)) <= most


@settings(max_examples=examples(150), deadline=None)
@given(graph=graphs(), work=st.sampled_from([1e6, 1e7]), most=st.sampled_from([3, 5, 30, 5000]))
def test_the_lightest_of_a_bin_is_a_downset_of_as_few_bytes(graph, work, most):
    graph = PlanningGraph.of(graph)
    cuts, bins = all_cuts(graph), bins_of(graph, work)
    position = {downset: index for index, downset in enumerate(cuts.downsets)}
    for some in (bins, bins.merged(most)):
        for index, downset in enumerate(some.lightest):
            at = position[downset]
            assert cuts.bytes_across[at] == pytest.approx(some.bytes_across[index])
            assert some.least_seconds[index] - 1e-12 <= cuts.seconds[at]
            assert cuts.seconds[at] <= some.most_seconds[index] + 1e-12


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(graph=graphs(), most_states=st.sampled_from([1, 2, 4]))
def test_what_is_forgotten_only_loosens_the_bounds(graph, most_states):
    graph = PlanningGraph.of(graph)
    cuts, bins = all_cuts(graph), bins_of(graph, 1e6, most_states)
    assert all(admits(bins, cuts, index).any() for index in range(len(cuts)))
    known = [downset for downset in bins.lightest if downset is not None]
    assert set(known) <= set(cuts.downsets)


@pytest.mark.slow
def test_branches_are_not_multiplied(make_graph):
    # Ten chains of six nodes side by side: 7**10 downsets, of which the lightest at any compute
    # time finish one branch after another. The first node of each is fat, its last thin.
    names = [f"n{b}_{i}" for b in range(10) for i in range(6)]
    costs = {n: (1, 1e6 if n.endswith("_0") else 10 if n.endswith("_5") else 1e3, 7) for n in names}
    edges = [f"n{b}_{i}-n{b}_{i + 1}" for b in range(10) for i in range(5)]
    edges += [f"n{b}_5-end" for b in range(10)]
    graph = PlanningGraph.of(make_graph(" ".join([*names, "end"]), " ".join(edges), **costs))
    bins = bins_of(graph)
    cuts = Cuts(graph, sorted(set(bins.lightest), key=lambda downset: downset.bit_count()))
    for finished in range(10):
        then = np.isclose(cuts.seconds, finished * 6e-3)
        assert cuts.bytes_across[then].min() == 10 * finished


def test_a_downset_is_in_no_later_bin_than_one_that_holds_it(make_graph):
    # Rounding alone puts a node that takes little into the bin of the next; had the bins been
    # sorted by what their downsets take, a stage would have gone from a later bin to an earlier.
    costs = {name: (0.7 + 0.3 * index, 1e3, 1e3) for index, name in enumerate("abcdef")}
    graph = PlanningGraph.of(make_graph("a b c d e f", "a-b b-c d-e e-f", **costs))
    cuts, bins = all_cuts(graph), bins_of(graph, 10)
    places = [np.flatnonzero(admits(bins, cuts, index)) for index in range(len(cuts))]
    for inner in range(len(cuts)):
        for outer in np.arange(len(cuts))[cuts.after(inner, len(cuts) - 1)]:
            assert any(
                a <= b and bins.row[a] <= bins.row[b] for a in places[inner] for b in places[outer]
            )
