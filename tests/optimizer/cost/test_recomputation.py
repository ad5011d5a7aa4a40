"""Which nodes of a stage are recomputed: few seconds, enough bytes, as exhaustive search says."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream.graph.model import Graph, Node
from pipedream.graph.profile import Footprint
from pipedream.optimizer.cost.memory import MemoryModel, Replicas, TrainingSettings
from pipedream.optimizer.cost.recomputation import Offloaded, Recomputable
from pipedream.optimizer.cost.stage_cost import MemoryLimit
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.schedule.policy import Peak


def planning(nodes, edges=None, parameters=0.0):
    """Nodes (forward seconds, saved, output bytes), one after the other [or with these edges], each
    with as many bytes of parameters.
    """
    known = {
        f"n{i}": Node(f"n{i}", "Layer", float(forward), 1.0, (float(output),), parameters)
        for i, (forward, _, output) in enumerate(nodes)
    }
    pairs = itertools.pairwise(range(len(nodes))) if edges is None else edges
    graph = Graph(known, tuple((f"n{a}", f"n{b}") for a, b in pairs))
    kept = {
        name: Footprint(float(saved), 0.0) for name, (_, saved, _) in zip(known, nodes, strict=True)
    }
    return PlanningGraph.of(graph, kept)


def test_what_keeps_nothing_runs_with_what_reads_it():
    """A block x + W(f(x)): f saves its input, W its own; what is added is nobody's."""
    graph = planning(
        [(1, 8, 8), (1, 8, 8), (5, 0, 8), (1, 8, 8), (1, 0, 8)],
        edges=[(0, 1), (1, 2), (2, 3), (0, 3), (3, 4)],
    )
    nodes = Recomputable(graph)
    assert nodes.cones == [(0,), (1,), (2,), (2, 3), (4,)]
    assert nodes.seconds.tolist() == [1, 1, 5, 6, 1]
    assert nodes.closed([3], range(5)) == (2, 3)
    assert nodes.closed([3], [3, 4]) == (3,)  # what an earlier stage has made is there
    assert 2 not in nodes.order


def test_a_long_chain_is_made_again_in_parts():
    """Nine alike: every third is kept, and two at a time are made again."""
    graph = planning([(1, 8, 8)] * 9 + [(1, 0, 8)])
    nodes = Recomputable(graph)
    again = [node for node in range(9) if node not in nodes._boundaries()]
    made = nodes.made_again(range(10), again)
    assert len(again) < 9
    assert 8 <= made.max() <= 4 * 8
    assert nodes.made_again(range(10), range(9)).max() == 9 * 8


def test_what_is_kept_of_a_device_of_a_mesh():
    """A quarter of an output was taken for no output: a residual that is added ran again with the
    products of matrices before it.
    """
    graph = planning([(1, 8, 8), (50, 8, 8), (1, 8, 8), (1, 0, 8)])
    assert Recomputable(graph).cones == [(0,), (1,), (2,), (3,)]
    names, quarter = graph.names, {"saved": 2.0, "share": 0.25}
    parts = {name: replace(graph.footprints[name], **quarter) for name in names[:3]}
    divided = PlanningGraph.of(graph.graph, {**graph.footprints, **parts})
    assert Recomputable(divided).cones == [(0,), (1,), (2,), (3,)]
    drawing = {"saved": 10.0, "share": 0.25, "drawn": 8.0}
    other = {names[1]: replace(graph.footprints[names[1]], **drawing)}
    drawn = Recomputable(PlanningGraph.of(graph.graph, {**graph.footprints, **other}))
    assert drawn.saved_bytes.tolist() == [8, 2, 8, 0], "what is drawn is kept in any case"
    assert drawn.cones == [(0,), (1,), (2,), (3,)]


def test_an_output_that_is_needed_late_stays_until_its_own_backward_pass():
    graph = planning([(1, 8, 8), (1, 4, 4), (1, 2, 2), (1, 0, 1)], [(0, 1), (1, 2), (2, 3), (0, 3)])
    made = Recomputable(graph).made_again(range(4), [0])
    assert made.tolist() == [8, 8, 8, 8]
    made = Recomputable(graph).made_again(range(4), [1])
    assert made.tolist() == [0, 4, 4, 0]


sizes = st.integers(1, 9)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(sizes, sizes), min_size=2, max_size=9),
    st.integers(1, 40),
)
def test_at_most_one_node_worse_than_the_best(chain, excess):
    """Where each frees what it saves, as for minibatches in flight."""
    nodes = Recomputable(planning([(forward, saved, saved) for forward, saved in chain]))
    free = list(nodes.order)

    def freed(some):
        return nodes.saved_bytes[list(some)].sum()

    chosen = nodes.choose(range(len(chain)), lambda some: freed(some) >= excess)
    enough = [
        nodes.seconds[list(some)].sum()
        for count in range(len(free) + 1)
        for some in itertools.combinations(free, count)
        if freed(some) >= excess
    ]
    if not enough:
        assert chosen is None
        return
    assert freed(chosen) >= excess
    assert nodes.seconds[list(chosen)].sum() <= min(enough) + nodes.seconds[free].max()


layers = st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(layers, min_size=3, max_size=12),
    st.integers(1, 3),
    st.floats(0.2, 1),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)
def test_what_the_search_assumes_can_be_had(chain, in_flight, share, last, replicas, programs):
    """The stage that is written needs no more seconds and no more bytes than the search counted;
    all figures lie between those of keeping all and of recomputing all. Several replicas divide the
    optimizer's state first, where that helps.
    """
    graph = planning(chain, parameters=4.0)
    cuts = Cuts(graph, [(1 << end) - 1 for end in range(len(graph) + 1)])
    gaps = dict.fromkeys(graph.names[::2], (0.5, 0.25))
    memory = MemoryModel(cuts, TrainingSettings("flush", "adam", gaps=gaps, programs=programs))
    peak = Peak(in_flight, 1)
    for start in range(0, len(graph), 2):
        ends = slice(start + 1, len(graph) + 1)
        plain = memory.total(start, ends, peak, False)
        limit = MemoryLimit(float(plain.max() * share), memory, "auto", "auto", selective=True)
        of = limit.replicas(start, ends, peak, last, replicas)
        fits, seconds = limit.choose(start, ends, peak, last, of)
        whole = MemoryLimit(limit.bytes, memory, "whole").choose(start, ends, peak, last, of)
        assert (fits | ~whole[0]).all(), "nothing that fitted is lost"
        assert (seconds[whole[0]] <= whole[1][whole[0]] + 1e-9).all()
        for place, end in enumerate(range(start + 1, len(graph) + 1)):
            own = Replicas(replicas, int(np.broadcast_to(of.parts, fits.shape)[place]))
            chosen = limit.chosen(start, end, peak, last, own)
            items = memory.of(start, end, peak, chosen, own)
            if not fits[place]:
                continue
            assert items.total <= limit.bytes + 1e-9
            inside = list(cuts.nodes(start, end))
            again = inside if chosen is True else list(chosen or ())
            assert graph.forward_seconds[again].sum() <= seconds[place] + 1e-9
            assert items.recomputed >= 0
            assert items.activations >= 0


def test_single_nodes_only_where_they_are_allowed():
    graph = planning([(1, 8, 8), (3, 8, 8), (1, 8, 8), (1, 0, 8)])
    memory = MemoryModel(Cuts(graph, [0, 15]), TrainingSettings("flush"))
    peak = Peak(3, 1)
    most = float(memory.total(0, slice(1, 2), peak, False)[0]) - 1
    assert MemoryLimit(most, memory, "whole").chosen(0, 1, peak, False) is True
    assert MemoryLimit(most, memory, "never", selective=True).chosen(0, 1, peak, False) is False
    assert MemoryLimit(most, memory, "auto", selective=True).chosen(0, 1, peak, False) in (
        (0,),
        (2,),
    )
    assert MemoryLimit(most, memory, "auto", selective=True).chosen(0, 1, peak, True) in (
        (0,),
        (2,),
    )
    assert MemoryLimit(most + 1, memory, "auto", selective=True).chosen(0, 1, peak, False) is False


def test_programs_make_all_again_at_once():
    """They compute the gradients of weights last, which may need any of it: so only minibatches
    that wait keep less.
    """
    graph = planning([(1, 8, 8), (3, 8, 8), (1, 8, 8), (1, 0, 8)])
    cuts = Cuts(graph, [0, 15])
    by_autograd, programs = (
        MemoryModel(cuts, TrainingSettings("flush", programs=own)) for own in (False, True)
    )
    nodes, ends = (0, 2), slice(1, 2)
    for in_flight in (1, 3):
        peak = Peak(in_flight, 1)
        plain = programs.total(0, ends, peak, False)[0]
        found = programs.of(0, 1, peak, nodes)
        assert found.total == plain - (in_flight - 1) * 16
        assert found.recomputed == 16
        assert by_autograd.of(0, 1, peak, nodes).total == found.total - 8, "one after the other"
        bound = programs.without_classes(0, ends, peak, 0)[0]
        assert bound == plain - (in_flight - 1) * 8


@pytest.mark.parametrize("programs", [False, True])
def test_what_rounding_leaves_of_activations_is_nothing(programs):
    """If all nodes run again: the plan of a stage of GPT-3 175B on a mesh had -5e-6 bytes."""
    draw = random.Random(3)
    for _ in range(20):
        graph = planning([(1, 1e9 * draw.random(), 0) for _ in range(9)])
        settings = TrainingSettings("flush", programs=programs)
        memory = MemoryModel(Cuts(graph, [0, 7, 511]), settings)
        for start, end in ((0, 1), (1, 2)):
            inside = tuple(memory.cuts.nodes(start, end))
            found = memory.of(start, end, Peak(3, 1), inside)
            assert found.activations == pytest.approx(0.0, abs=1e-3)


def test_the_state_is_divided_before_single_nodes_run_again_or_move():
    """What is freed so counts for nodes, and for what moves to the host, as for whole stages."""
    graph = planning([(1, 8, 8), (3, 8, 8), (1, 8, 8), (1, 0, 8)], parameters=4.0)
    memory = MemoryModel(Cuts(graph, [0, 15]), TrainingSettings("flush", "adam"))
    peak, ends, divided = Peak(3, 1), slice(1, 2), (1 - 1 / 2) * 2 * 4 * 4.0
    plain = float(memory.total(0, ends, peak, False, Replicas(2))[0])
    for way in (
        lambda parts: memory.without_classes(0, ends, peak, 0, Replicas(2, parts))[0],
        lambda parts: memory.offloaded(0, ends, peak, Replicas(2, parts))[0],
        lambda parts: memory.of(0, 1, peak, (0,), Replicas(2, parts)).total,
        lambda parts: memory.of(0, 1, peak, Offloaded(0.0), Replicas(2, parts)).total,
    ):
        assert way(1) < plain
        assert way(2) == way(1) - divided
    for some, zero, expected in (
        (plain, "auto", (1, False)),
        (plain - divided, "auto", (2, False)),
        (plain - divided - 1, "auto", (2, (0,))),
        (plain - 1, "always", (2, False)),
        (plain - 1, "never", (1, (0,))),
    ):
        limit = MemoryLimit(some, memory, "auto", zero, selective=True)
        of = limit.replicas(0, ends, peak, False, 2)
        fits, seconds = limit.choose(0, ends, peak, False, of)
        own = Replicas(2, int(np.ravel(of.parts)[0]))
        again = limit.chosen(0, 1, peak, False, own)
        assert (own.parts, again) == expected, (some, zero)
        assert fits[0]
        assert (seconds[0] > 0) == bool(again)


def test_without_footprints_outputs_stand_for_what_is_saved():
    graph = planning([(1, 8, 8), (3, 8, 8), (1, 0, 8)])
    assumed = PlanningGraph.of(graph.graph)
    assert assumed.own_saved_bytes.tolist() == [8, 8, 0]
    assert assumed.saved_bytes.tolist() == [8, 8, 8]
    assert np.isfinite(Recomputable(assumed).seconds).all()
