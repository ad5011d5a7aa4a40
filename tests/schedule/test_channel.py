"""Which links messages take between ranks."""

from __future__ import annotations

from schedules import assigned

from pipedream.schedule.channel import rank_links


def test_a_middle_stage_sends_and_receives_on_links_of_their_own() -> None:
    """NCCL does what is on one link in its order. With all activations on one way, a send of the
    middle stage waited for the receive of the next minibatch, which was posted before it, and that
    minibatch for the gradients of this one.
    """
    chain = rank_links(assigned([[0], [1], [2]]), [(0, 1), (1, 2)])
    assert chain == [(0, 1, False), (1, 0, True), (1, 2, False), (2, 1, True)]


def test_replicas_send_to_those_that_their_minibatches_run_on() -> None:
    assert rank_links(assigned([[0, 1], [2, 3]]), [(0, 1)]) == [
        *[(0, 2, False), (1, 3, False), (2, 0, True), (3, 1, True)]
    ]
    assert len(rank_links(assigned([[0, 1], [2, 3, 4]]), [(0, 1)])) == 12


def test_links_between_two_ranks_share_one_and_stages_of_one_rank_need_none() -> None:
    """Ranks with two stages each."""
    links = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)]
    assert rank_links(assigned([[0], [1], [0], [1]]), links) == [
        (0, 1, False),
        (0, 1, True),
        (1, 0, False),
        (1, 0, True),
    ]
