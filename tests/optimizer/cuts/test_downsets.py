from itertools import pairwise

import numpy as np
import pytest

from pipedream.optimizer.cuts.antichains import all_downsets, bits
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import PlanningGraph


@pytest.fixture
def cuts(make_graph):
    r"""a feeds b and c, and skips to d."""
    graph = make_graph(
        "a b c d",
        "a-b a-c b-d c-d a-d",
        a=(1, 100, 1),
        b=(2, 20, 10),
        c=(0, 3, 100),
        d=(8, 7, 1000),
    )
    planning = PlanningGraph.of(graph)
    return Cuts(planning, all_downsets(planning, 100))


def at(cuts, names):
    """The state whose nodes are these."""
    wanted = set(names)
    found = [{cuts.graph.names[n] for n in bits(downset)} for downset in cuts.downsets]
    return found.index(wanted)


def test_what_lies_before_a_cut(cuts):
    state = at(cuts, "abc")
    assert cuts.seconds[state] == pytest.approx(0.003)
    assert cuts.working[state] == 2
    assert cuts.parameter_bytes[state] == 111
    assert cuts.sum(cuts.graph.output_bytes)[state] == 123


def test_each_live_tensor_crosses_once(cuts):
    assert cuts.bytes_across[at(cuts, "")] == 0
    assert cuts.bytes_across[at(cuts, "a")] == 100  # three read it
    assert cuts.bytes_across[at(cuts, "ab")] == 120
    assert cuts.bytes_across[at(cuts, "abc")] == 123  # d still reads a
    assert cuts.bytes_across[at(cuts, "abcd")] == 0  # d ends the model


def test_after_gives_the_downsets_that_contain_this_one(cuts):
    last = len(cuts) - 1
    assert np.arange(len(cuts))[cuts.after(at(cuts, "a"), last)].tolist() == [
        *(at(cuts, names) for names in ("ab", "ac", "abc", "abcd"))
    ]
    assert np.arange(len(cuts))[cuts.after(at(cuts, "ab"), last)].tolist() == [
        *(at(cuts, names) for names in ("abc", "abcd"))
    ]
    assert np.arange(len(cuts))[cuts.after(at(cuts, "ab"), at(cuts, "abc"))].tolist() == [
        at(cuts, "abc")
    ]


def test_nodes_of_a_stage(cuts):
    stage = cuts.nodes(at(cuts, "a"), at(cuts, "abc"))
    assert [cuts.graph.names[node] for node in stage] == ["b", "c"]


def test_a_stage_reads_only_what_its_nodes_consume(cuts):
    read = cuts.bytes_read(at(cuts, "ab"))
    assert read[at(cuts, "abc")] == 100  # a; b is only passed by
    assert read[at(cuts, "abcd")] == 120
    assert cuts.bytes_read(0)[at(cuts, "abcd")] == 0


def test_more_nodes_than_bits_in_a_word(make_graph):
    names = [f"n{i}" for i in range(130)]
    edges = " ".join(f"{a}-{b}" for a, b in pairwise(names))
    planning = PlanningGraph.of(make_graph(" ".join(names), edges))
    cuts = Cuts(planning, all_downsets(planning, 200))
    assert cuts.after(70, 130) == slice(71, 131)
    assert cuts.nodes(126, 129) == (126, 127, 128)
    assert cuts.seconds[129] == pytest.approx(0.129)
