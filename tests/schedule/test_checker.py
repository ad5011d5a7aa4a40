"""The checker on ranks with several stages, and on backward passes in two halves."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from textwrap import dedent

import pytest
from pipelines import Orders, halved, interleaved, zero_bubble
from schedules import assigned, schedule

from pipedream.graph.choices import SCHEDULES
from pipedream.schedule.action import Kind, parse_action
from pipedream.schedule.checker import UnsoundError, check, check_actions, check_ranks
from pipedream.schedule.generate import Step
from pipedream.schedule.schedule import Schedule

SKIPS = [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)]
BOTH = [interleaved(2, 4, 8, 4, SKIPS), zero_bubble(3, 7, 4, [(0, 1), (0, 2), (1, 2)])]


def checked(orders: Orders):
    return check_ranks(orders.schedule, orders.actions, orders.assignment)


def test_two_stages_on_each_rank():
    orders = interleaved(2, 4, 4, 4)
    assert orders.shown == dedent("""\
        0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3""")
    assert checked(orders) == {(0, 0): (4, 1), (1, 0): (3, 1), (2, 0): (2, 1), (3, 0): (1, 1)}


def test_halves_of_backward_passes():
    """The minibatch is in flight until the second half: as many here as there."""
    orders = zero_bubble(2, 4, 4)
    assert orders.shown == dedent("""\
        0  0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
        1  1F0 1BI0 1F1 1BI1 1BW0 1F2 1BI2 1BW1 1F3 1BI3 1BW2 1BW3""")
    assert checked(orders) == {(0, 0): (2, 1), (1, 0): (2, 1)}
    assert list(map(str, orders.actions[1][:7])) == [
        *("1RA0<0", "1F0", "1BI0", "1SG0>0", "1RA1<0", "1F1", "1BI1"),
    ]
    assert list(map(str, orders.actions[1][-3:])) == ["1BW2", "1BW3", "1U0/4@1"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3])
def test_any_number_of_ranks_and_stages_is_sound(ranks, chunks):
    """With skips from a rank to itself, which wait for nobody."""
    stages = ranks * chunks
    pairs = list(combinations(range(stages), 2))
    links = [(s, t) for s, t in pairs if t == s + 1 or (t - s) % ranks == 0]
    checked(interleaved(ranks, stages, 4 * ranks, 2 * ranks, links))
    assert set(checked(zero_bubble(stages, 25, 12, pairs)).values()) == {(stages, 1)}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("replicas", [(1,), (1, 1), (2, 1), (1, 3), (4, 3, 1)], ids=str)
def test_every_schedule_goes_in_halves(name, replicas):
    links = [(stage, stage + 1) for stage in range(len(replicas) - 1)]
    made = schedule(name, replicas, links, 23, 4)
    assert checked(halved(made)) == check(made)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("orders", BOTH, ids=["interleaved", "zero bubble"])
def test_every_dropped_or_doubled_action_is_noticed(orders):
    checked(orders)
    for rank, actions in orders.actions.items():
        for position, action in enumerate(actions):
            for wrong in ([], [action, action]):
                changed = [*actions[:position], *wrong, *actions[position + 1 :]]
                with pytest.raises(UnsoundError):
                    checked(
                        Orders(orders.schedule, orders.ranks, {**orders.actions, rank: changed})
                    )


def swapped(orders: Orders, rank: int, one: str, other: str) -> str:
    """The complaint when two actions of a rank change places."""
    listed = list(orders.actions[rank])
    first, second = (listed.index(parse_action(text)) for text in (one, other))
    listed[first], listed[second] = listed[second], listed[first]
    with pytest.raises(UnsoundError) as caught:
        checked(Orders(orders.schedule, orders.ranks, {**orders.actions, rank: listed}))
    return str(caught.value)


def test_messages_of_two_links_between_two_ranks_have_one_order():
    """A group of NCCL would give the one to whoever asks first."""
    orders = interleaved(2, 4, 4, 4)
    listed = list(orders.actions[0])
    message = parse_action("2SA1>3")
    listed.remove(message)
    listed.insert(listed.index(parse_action("0SA2>1")) + 1, message)
    with pytest.raises(UnsoundError, match=r"worker 3 at 3RA1<2: minibatch 2 from 0 to 1 comes"):
        checked(Orders(orders.schedule, orders.ranks, {**orders.actions, 0: listed}))


def test_a_skip_to_a_rank_that_other_links_lead_to_is_received_when_its_turn_comes():
    """It is sent with the message to the next stage, and needed a whole turn later: it was received
    then, and the message to the next stage stood before it.
    """
    orders = interleaved(2, 4, 4, 4, [(0, 1), (0, 3), (1, 2), (2, 3)])
    checked(orders)
    assert list(map(str, orders.actions[1][:6])) == [
        *("1RA0<0", "1F0", "1SA0>2", "3RA0<0", "1RA1<0", "1F1"),
    ]


def test_messages_of_one_rank_to_itself_have_an_order_for_each_link():
    every = [(0, 1), (0, 2), (1, 2)]
    pipeline = zero_bubble(3, 2, 2, every).schedule
    passes = [(s, kind, b) for kind in "FB" for s in range(3) for b in (0, 1)]
    passes = [*passes[:6], *(p for s in (2, 1, 0) for p in passes[6:] if p[0] == s)]
    steps = [((s, 0), Step(0, Kind(kind), b, 0)) for s, kind, b in passes]
    orders = Orders.of(pipeline, [[0], [0], [0]], lambda _: iter(steps))
    checked(orders)
    assert "minibatch 0 comes first" in swapped(orders, 0, "2RA0<0", "2RA1<0")


@pytest.mark.parametrize(
    ("one", "other", "problem"),
    [
        ("1BI1", "1BW1", "the second half without the first"),
        ("1BI0", "1SG0>0", "sends what is not made yet"),
        ("1BW3", "1U0/4@1", "minibatch 3 has not had its backward pass"),
        ("1F0", "1BI0", "backward without a forward"),
    ],
)
def test_halves_that_change_places_are_noticed(one, other, problem):
    assert problem in swapped(zero_bubble(2, 4, 4), 1, one, other)


@pytest.mark.parametrize(
    ("half", "problem"),
    [
        ("1BI1", "at 1BW1: backward without a forward"),
        ("1BW1", "has begun its backward pass before"),
    ],
)
def test_a_pass_that_is_halved_is_not_whole_as_well(half, problem):
    orders = zero_bubble(2, 4, 4)
    listed = [a._replace(kind=Kind.BACKWARD) if str(a) == half else a for a in orders.actions[1]]
    with pytest.raises(UnsoundError, match=problem):
        checked(Orders(orders.schedule, orders.ranks, {**orders.actions, 1: listed}))


def test_tied_stages_on_one_rank_add_up_together():
    """Each of them waited for the other, on the same rank, as stage 3 did for what its own rank had
    yet to do. An update before the last of these sums is noticed.
    """
    for tied in ((0, 2), (0, 3), (0, 1, 2, 3)):
        orders = interleaved(2, 4, 4, 4)
        spec = replace(orders.schedule.spec, tied=tied)
        checked(Orders.made(Schedule(spec, 4), orders.ranks))
    orders = Orders.made(Schedule(replace(spec, tied=(0, 2)), 4), orders.ranks)
    listed = [str(action) for action in orders.actions[0]]
    assert listed[-4:] == ["2AR0/4@1", "0AR0/4@1", "0U0/4@1", "2U0/4@1"]
    assert "at 0U0/4@1: update before its all-reduce" in swapped(orders, 0, *listed[-3:-1])


def test_an_action_of_a_stage_that_another_rank_has():
    orders = interleaved(2, 4, 4, 4)
    listed = [*orders.actions[0], parse_action("1F0")]
    with pytest.raises(UnsoundError, match="worker 0 at 1F0: an action of another worker"):
        checked(Orders(orders.schedule, orders.ranks, {**orders.actions, 0: listed}))


def test_one_worker_to_a_rank_is_as_before():
    made = schedule("weight-stashing", (2, 1), [(0, 1)], 9)
    lists = {worker: made.actions(worker) for worker in made.workers}
    by_rank = dict(enumerate(lists.values()))
    assert check_ranks(made, by_rank, assigned([[0, 1], [2]])) == check_actions(made, lists)
