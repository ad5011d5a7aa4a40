import pytest

from pipedream.optimizer.antichain import AntichainDag
from pipedream.optimizer.cuts import Cuts
from pipedream.optimizer.memory import in_flight, stage_memory
from pipedream.optimizer.planning import PlanningGraph


@pytest.fixture
def cuts(make_graph):
    graph = make_graph("a b c", "a-b b-c a-c", a=(1, 100, 1), b=(1, 20, 10), c=(1, 3, 0))
    planning = PlanningGraph.of(graph)
    return Cuts(planning, AntichainDag.of(planning, 10).downsets)


def test_workers_behind_a_worker_and_itself():
    assert [in_flight(load) for load in range(3)] == [1, 2, 3]


def test_weight_stashing_keeps_a_version_for_each_minibatch(cuts):
    memory = stage_memory(cuts, "weight-stashing", 0, slice(2, 3), 3)
    assert memory.parameters.tolist() == [11 * (3 + 1)]
    assert memory.stash.tolist() == [3 * 120]
    assert memory.total.tolist() == [44 + 360]


def test_flush_keeps_one_version(cuts):
    memory = stage_memory(cuts, "flush", 0, slice(2, 3), 3)
    assert memory.parameters.tolist() == [11 * 2]
    assert memory.stash.tolist() == [3 * 120]


def test_what_a_stage_receives_is_stashed_too(cuts):
    memory = stage_memory(cuts, "flush", 1, slice(2, 4), 2)
    assert memory.stash.tolist() == [2 * (20 + 100), 2 * (23 + 100)]
    last = stage_memory(cuts, "flush", 2, slice(3, 4), 2)
    assert last.stash.tolist() == [2 * (3 + 120)]
