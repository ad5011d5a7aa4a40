import itertools
import math

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream.graph.choices import SCHEDULES
from pipedream.graph.model import Graph, Node
from pipedream.graph.profile import Footprint
from pipedream.optimizer.cost import memory
from pipedream.optimizer.cost.memory import HeldBytes, MemoryModel, Replicas, TrainingSettings
from pipedream.optimizer.cost.stage_cost import MemoryLimit
from pipedream.optimizer.cuts.antichains import all_downsets
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.schedule.policy import Peak


def cuts_of(graph, footprints=None):
    planning = PlanningGraph.of(graph, footprints)
    return Cuts(planning, all_downsets(planning, 1000))


@pytest.fixture
def graph(make_graph):
    """a -> b -> c, and a -> c. Outputs 100, 20, 3; parameters 1, 10, 0."""
    return make_graph("a b c", "a-b b-c a-c", a=(1, 100, 1), b=(1, 20, 10), c=(1, 3, 0))


def items(held, start, end, minibatches, recompute=False):
    peak = Peak(minibatches, held.settings.peak(minibatches - 1).versions)
    found = held.of(start, end, peak, recompute)
    total = held.total(start, slice(end, end + 1), peak, recompute)
    assert [found.total] == total.tolist()
    return found.model_dump()


def test_workers_behind_a_worker_and_itself():
    assert [TrainingSettings().peak(load) for load in range(3)] == [(1, 1), (2, 2), (3, 3)]
    assert [TrainingSettings("flush").peak(load) for load in range(3)] == [(1, 1), (2, 1), (3, 1)]
    assert [TrainingSettings("2bw").peak(load) for load in range(3)] == [(1, 2), (2, 2), (3, 2)]
    assert [TrainingSettings("gpipe", "sgd", 8).peak(load) for load in range(3)] == [(8, 1)] * 3


def test_weight_stashing_keeps_a_version_for_each_minibatch(graph):
    held = MemoryModel(cuts_of(graph), TrainingSettings("weight-stashing", "adam"))
    # At the backward pass of b, the first: all is still saved, and b's gradients come.
    assert items(held, 0, 2, 3) == {
        "parameters": 11,
        "weight_versions": 2 * 11,
        "optimizer_state": 2 * 11,
        "gradients": 0,
        "buckets": 0,
        "activations": 3 * 120,
        "recomputed": 0,
        "inputs": 120,  # the gradients of what the stage has sent: of a's output and b's
        "workspace": 10,
        "allocator": 0,
    }


def test_what_passes_allocate_takes_more_of_a_device_and_weights_do_not(graph):
    plain = items(MemoryModel(cuts_of(graph), TrainingSettings("2bw", "adam")), 0, 2, 3)
    settings = TrainingSettings("2bw", "adam", gaps={"a": (0.25, 0.25), "b": (0.25, 0.25)})
    found = items(MemoryModel(cuts_of(graph), settings), 0, 2, 3)
    passing = ("gradients", "activations", "inputs", "workspace")
    assert found == plain | {"allocator": sum(plain[name] for name in passing) / 4}


def test_the_allocators_share_of_a_stage_is_the_mean_of_its_nodes(graph):
    """By what they save and learn: 101 bytes of a, 30 of b, 3 of c, which has no gaps. What waits
    for its turn leaves half of those that the oldest minibatch leaves.
    """
    plain = MemoryModel(cuts_of(graph), TrainingSettings("2bw", "adam"))
    gaps = {"a": (2.0, 1.0), "b": (0.5, 0.25)}
    held = MemoryModel(plain.cuts, TrainingSettings("2bw", "adam", gaps=gaps))
    for start, end, saved, share in (
        (0, 1, 100, 2.0),
        (0, 2, 120, (2 * 101 + 0.5 * 30) / 131),
        (1, 2, 20, 0.5),
        (2, 3, 6, 0.0),
    ):
        for recompute in (False, True):
            found, without = (items(each, start, end, 3, recompute) for each in (held, plain))
            waiting = without["inputs"] + (0 if recompute else 2 * saved)
            passing = ("gradients", "activations", "recomputed", "inputs", "workspace")
            oldest = sum(without[name] for name in passing) - waiting
            assert found["allocator"] == pytest.approx(share * (oldest + waiting / 2))
            assert found == without | {"allocator": found["allocator"]}


def test_minibatches_read_ahead_are_those_of_the_stages_that_read_an_input(make_graph):
    graph = make_graph("in a b", "in-a a-b", a=(1, 5, 30), b=(1, 45, 7))
    graph = graph.with_nodes([Node(id="in", description="Input0")])
    kept = {"in": Footprint(0, 0, 9), "a": Footprint(1000, 33), "b": Footprint(200, 44)}
    held = MemoryModel(cuts_of(graph, kept), TrainingSettings(read_ahead=2))
    assert items(held, 0, 1, 2)["inputs"] == (3 + 2) * 9 + 5
    assert items(held, 1, 2, 1)["inputs"] == 2 * 5


def test_flush_keeps_one_version_and_gradients_all_the_time(graph):
    held = MemoryModel(cuts_of(graph), TrainingSettings("flush", "momentum"))
    found = items(held, 0, 2, 3)
    assert (found["weight_versions"], found["optimizer_state"]) == (0, 11)
    assert found["gradients"] == 11


def test_what_a_stage_receives_is_kept_and_one_more_is_on_its_way(graph):
    held = MemoryModel(cuts_of(graph), TrainingSettings("flush"))
    assert items(held, 1, 2, 2)["inputs"] == 3 * 100 + 120
    assert items(held, 2, 3, 1)["inputs"] == 2 * 120


def test_recomputation_keeps_one_set_of_activations(graph):
    held = MemoryModel(cuts_of(graph), TrainingSettings())
    plain, again = (items(held, 0, 2, 3, recompute) for recompute in (False, True))
    assert again == plain | {"activations": 0, "recomputed": 120}


def test_gradients_come_as_activations_go(make_graph):
    # At b 50 are saved and b's 7 come; at a 5 are saved, and there are 7 + 30.
    graph = make_graph("a b", "a-b", a=(1, 5, 30), b=(1, 45, 7))
    held = MemoryModel(cuts_of(graph), TrainingSettings())
    found = items(held, 0, 2, 1)
    assert (found["activations"], found["gradients"], found["workspace"]) == (50, 0, 7)
    graph = make_graph("a b", "a-b", a=(1, 45, 30), b=(1, 5, 7))
    found = items(MemoryModel(cuts_of(graph), TrainingSettings()), 0, 2, 1)
    assert (found["activations"], found["gradients"], found["workspace"]) == (45, 7, 30)


def test_measured_footprints_take_the_place_of_outputs(make_graph):
    graph = make_graph("in a b", "in-a a-b", a=(1, 5, 30), b=(1, 45, 7))
    graph = graph.with_nodes([Node(id="in", description="Input0")])
    kept = {"in": Footprint(0, 0, 9), "a": Footprint(1000, 33), "b": Footprint(200, 44)}
    held = MemoryModel(cuts_of(graph, kept), TrainingSettings())
    found = items(held, 0, 2, 2)
    # The loss saves as much as it reads, the 45 bytes of b.
    assert found["activations"] == 2 * 1245
    assert found["inputs"] == 3 * 9
    assert found["workspace"] == 44
    assert items(held, 1, 2, 1)["inputs"] == 2 * 5


def chains():
    sizes = st.integers(0, 9)
    return st.lists(st.tuples(sizes, sizes, sizes), min_size=2, max_size=40)


@settings(max_examples=examples(50), deadline=None)
@given(chain=chains(), schedule=st.sampled_from(SCHEDULES))
def test_many_nodes_share_moments_and_little_is_lost(chain, schedule):
    nodes = {f"n{i}": Node(f"n{i}", "Layer", 1.0) for i in range(len(chain))}
    for (name, node), (saved, _, parameters) in zip(list(nodes.items()), chain, strict=True):
        changed = Node(name, node.description, 1.0, 0.0, (saved,), parameters)
        nodes[name] = changed
    names = list(nodes)
    graph = Graph(nodes, tuple(itertools.pairwise(names)))
    kept = {
        name: Footprint(saved, workspace + parameters)
        for name, (saved, workspace, parameters) in zip(names, chain, strict=True)
    }
    cuts = cuts_of(graph, kept)
    exact = MemoryModel(cuts, TrainingSettings(schedule))
    before, memory.MOMENTS = memory.MOMENTS, 1000
    try:
        finest = MemoryModel(cuts, TrainingSettings(schedule))
    finally:
        memory.MOMENTS = before
    last = len(cuts) - 1
    for start in range(0, last, 5):
        ends = slice(start + 1, last + 1)
        rough, fine = (held.total(start, ends, Peak(2, 2), False) for held in (exact, finest))
        assert np.all(np.abs(rough - fine) <= 0.1 * fine + 40)


def test_the_choice_is_the_cheaper_one_that_fits(graph):
    held = MemoryModel(cuts_of(graph), TrainingSettings())
    ends = slice(1, 4)
    plain = held.total(0, ends, Peak(2, 2), False)
    again = held.total(0, ends, Peak(2, 2), True)
    assert (again < plain).all()
    for allowed, some, expected in (
        ("whole", plain.max(), ([True] * 3, [False] * 3)),
        ("auto", again[1], ((again <= again[1]).tolist(), (plain > again[1]).tolist())),
        ("never", again[1], ((plain <= again[1]).tolist(), [False] * 3)),
        ("always", math.inf, ([True] * 3, [True] * 3)),
    ):
        limit = MemoryLimit(some, held, allowed)
        fits, seconds = limit.choose(0, ends, Peak(2, 2), last=False)
        forward = held.cuts.forward_seconds[ends]
        again = np.where(np.array(expected[1]) & fits, forward, 0.0)
        assert (fits.tolist(), seconds.tolist()) == (expected[0], again.tolist()), allowed
    fits, seconds = MemoryLimit(math.inf, held, "always").choose(0, ends, Peak(1, 1), last=True)
    assert not seconds.any(), "the backward pass follows at once"


def test_predicted_weights_stand_beside_the_newest_and_the_last_step(graph):
    """One copy for each minibatch in flight; the last stage predicts nothing."""
    corrections = frozenset({"weight_prediction"})
    held = MemoryModel(
        cuts_of(graph), TrainingSettings("weight-stashing", "momentum", corrections=corrections)
    )
    found = items(held, 0, 2, 3)
    assert (found["weight_versions"], found["optimizer_state"]) == (3 * 11, 2 * 11)
    found = items(held, 0, 2, 1)
    assert (found["weight_versions"], found["optimizer_state"]) == (0, 11)


def test_steps_to_be_made_good_are_kept_as_long_as_older_versions(graph):
    """Replicas that divide the updates keep those of their parts; the last stage keeps none."""
    corrections = frozenset({"error_feedback"})
    held = MemoryModel(
        cuts_of(graph), TrainingSettings("weight-stashing", "adam", corrections=corrections)
    )
    kept = {n: items(held, 0, 2, n)["optimizer_state"] for n in (1, 2, 3)}
    assert kept == {n: (2 + n - 1) * 11 for n in (1, 2, 3)}
    divided = held.of(0, 2, Peak(3, 3), False, Replicas(4, 4))
    assert divided.optimizer_state == (2 + 2) * 11 / 4
    two = MemoryModel(cuts_of(graph), TrainingSettings("2bw", "adam", corrections=corrections))
    assert items(two, 0, 2, 1)["optimizer_state"] == (2 + 1) * 11, "the last stage, too"


def test_bases_are_part_of_the_optimizers_state(graph):
    footprints = {name: Footprint(1, 1, bases=100 * k) for k, name in enumerate(graph.order)}
    cuts = cuts_of(graph, footprints)
    plain, rotated = (
        MemoryModel(cuts, TrainingSettings("weight-stashing", "adam", corrections=corrections))
        for corrections in (frozenset(), frozenset({"basis_rotation"}))
    )
    for start, end in ((0, 2), (1, len(cuts) - 1)):
        of = [held.of(start, end, Peak(2, 2), False) for held in (plain, rotated)]
        bases = 100.0 * sum(
            graph.order.index(cuts.graph.names[node]) for node in cuts.nodes(start, end)
        )
        assert of[1] == of[0].model_copy(update={"optimizer_state": of[0].optimizer_state + bases})
        total = rotated.total(start, slice(end, end + 1), Peak(2, 2), False)
        assert total == [of[1].total]


def test_finding_bases_takes_memory_at_the_update(graph):
    """That of the parameter which needs most, once activations are gone."""
    gaps = dict.fromkeys(graph.order, (0.5, 0.0))
    for finding in (10.0, 10_000.0):
        footprints = {name: Footprint(1000, 1, finding=finding) for name in graph.order}
        corrections = frozenset({"basis_rotation"})
        settings = TrainingSettings("weight-stashing", "sgd", corrections=corrections, gaps=gaps)
        found = items(MemoryModel(cuts_of(graph, footprints), settings), 0, 2, 1)
        at_update = 11 + 1.5 * 11 + found["inputs"] + finding
        assert (sum(found.values()) == pytest.approx(at_update)) == (finding == 10_000.0)


def test_replicas_divide_the_optimizers_state_and_nothing_else(graph):
    held = MemoryModel(cuts_of(graph), TrainingSettings("weight-stashing", "adam"))
    plain, divided = (held.of(0, 2, Peak(3, 3), False, Replicas(4, parts)) for parts in (1, 4))
    assert divided == plain.model_copy(update={"optimizer_state": 2 * 11 / 4})
    each = held.total(0, slice(2, 4), Peak(3, 3), False, Replicas(4, np.array([4, 1])))
    assert each.tolist() == [divided.total, held.of(0, 3, Peak(3, 3), False, Replicas(4)).total]


def test_replicas_add_their_gradients_up_in_buckets(graph):
    """As many bytes again as the parameters, all the time."""
    held = MemoryModel(cuts_of(graph), TrainingSettings("weight-stashing", "adam"))
    alone, several = (held.of(0, 2, Peak(3, 3), False, Replicas(number)) for number in (1, 4))
    assert several == alone.model_copy(update={"buckets": 11})
    assert held.total(0, slice(2, 3), Peak(3, 3), False, Replicas(4)) == [several.total]
    assert HeldBytes.of(several, Peak(3, 3)).always == HeldBytes.of(alone, Peak(3, 3)).always + 11


def test_the_state_is_divided_before_a_stage_recomputes(graph):
    """Of a stage alone, without replicas, there is nothing to divide."""
    held = MemoryModel(cuts_of(graph), TrainingSettings("weight-stashing", "adam"))
    plain, divided, both = (
        held.total(0, slice(2, 3), Peak(2, 2), recompute, Replicas(2, parts))[0]
        for recompute, parts in ((False, 1), (False, 2), (True, 2))
    )
    assert both < divided < plain
    for some, zero, expected in (
        (plain, "auto", (1, True, False)),
        (divided, "auto", (2, True, False)),
        (both, "auto", (2, True, True)),
        (both - 1, "auto", (2, False, True)),
        (plain, "always", (2, True, False)),
        (divided, "never", (1, True, True)),
    ):
        limit = MemoryLimit(some, held, "auto", zero)
        asked = 0, slice(2, 3), Peak(2, 2), False
        of = limit.replicas(*asked, 2)
        fits, seconds = limit.choose(*asked, of)
        own = Replicas(2, int(np.ravel(of.parts)[0]))
        recompute = limit.chosen(0, 2, Peak(2, 2), False, own)
        assert (own.parts, *fits, recompute) == expected, (some, zero)
        assert (seconds[0] > 0) == (fits[0] and recompute), (some, zero)
        assert limit.replicas(*asked, 1) == (1, 1)
