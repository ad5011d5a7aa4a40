from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.rank_assignment import ranks
from pipedream.optimizer.search.stages import NestedStage, Share

FOUR_TWO = Cluster(machines=(4, 2), bandwidth=(1e10, 1e9))


def stage(*shares):
    """(offset, replicas) of each level, innermost first."""
    return NestedStage(
        tuple(
            Share(level, 0, 1, offset, replicas, False)
            for level, (offset, replicas) in enumerate(shares, start=1)
        )
    )


def test_rank_5_is_device_1_of_machine_1():
    assert ranks(stage((1, 1), (1, 1)), FOUR_TWO) == (5,)


def test_a_stage_has_the_same_devices_in_each_of_its_machines():
    assert sorted(ranks(stage((1, 3), (0, 2)), FOUR_TWO)) == [1, 2, 3, 5, 6, 7]


def test_stages_that_share_machines_keep_each_minibatch_inside_one():
    first = ranks(stage((0, 1), (0, 2)), FOUR_TWO)
    second = ranks(stage((1, 3), (0, 2)), FOUR_TWO)
    assert first == (0, 4)
    assert second == (1, 5, 2, 6, 3, 7)
    for minibatch in range(12):
        machine = first[minibatch % 2] // 4
        assert second[minibatch % 6] // 4 == machine


def test_three_levels_keep_each_minibatch_inside_too():
    cluster = Cluster(machines=(4, 3, 2), bandwidth=(1e10, 1e9, 1e8))
    first = ranks(stage((0, 1), (1, 2), (0, 2)), cluster)
    second = ranks(stage((1, 3), (1, 2), (0, 2)), cluster)
    assert sorted(first) == [4, 8, 16, 20]
    for minibatch in range(36):
        assert first[minibatch % 4] // 4 == second[minibatch % 12] // 4
