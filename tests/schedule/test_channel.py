"""Which links messages take between ranks."""

from __future__ import annotations

from schedules import assigned

from pipedream.graph.plan import WorkerGroup
from pipedream.schedule.channel import team_links


def test_a_middle_stage_sends_and_receives_on_links_of_their_own() -> None:
    """NCCL does what is on one link in its order. With all activations on one way, a send of the
    middle stage waited for the receive of the next minibatch, which was posted before it, and that
    minibatch for the gradients of this one.
    """
    chain = team_links(assigned([[0], [1], [2]]), [(0, 1), (1, 2)])
    assert chain == [
        ((0,), (1,), False),
        ((1,), (0,), True),
        ((1,), (2,), False),
        ((2,), (1,), True),
    ]


def test_replicas_send_to_those_that_their_minibatches_run_on() -> None:
    assert team_links(assigned([[0, 1], [2, 3]]), [(0, 1)]) == [
        ((0,), (2,), False),
        ((1,), (3,), False),
        ((2,), (0,), True),
        ((3,), (1,), True),
    ]
    assert len(team_links(assigned([[0, 1], [2, 3, 4]]), [(0, 1)])) == 12


def test_links_between_two_ranks_share_one_and_stages_of_one_rank_need_none() -> None:
    """Ranks with two stages each."""
    links = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)]
    assert team_links(assigned([[0], [1], [0], [1]]), links) == [
        ((0,), (1,), False),
        ((0,), (1,), True),
        ((1,), (0,), False),
        ((1,), (0,), True),
    ]


def test_the_devices_of_two_meshes_share_one() -> None:
    """Each pair of devices had one, so that the middle one of three meshes of 8 had 32, and two of
    them one stream: a rank hung behind its own receive.
    """
    meshes = [[WorkerGroup(tuple(range(first, first + 8)))] for first in (0, 8, 16)]
    wanted = team_links(meshes, [(0, 1), (1, 2)])
    assert len(wanted) == 4
    assert len([link for link in wanted if 8 in link[0] + link[1]]) == 4
