"""The norm that all ranks agree on before an update: where it stands, and what the checker says
where it stands wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import B, F, Orders, halved, interleaved, with_norm, zero_bubble
from schedules import schedule

from pipedream.graph.choices import ScheduleName
from pipedream.schedule.action import CLOSING, Action, Kind, parse_action
from pipedream.schedule.checker import UnsoundError, check, check_actions, check_ranks
from pipedream.schedule.generate import Step
from pipedream.schedule.schedule import Schedule

UNIFORM = ("flush", "gpipe", "2bw")
CHAIN = ((0, 1), (1, 2), (2, 3))


def merged(
    name: ScheduleName, minibatches: int = 8, microbatches: int = 4, joint_norm: bool = True
) -> Orders:
    """Four stages on two ranks, each rank in the order of the list scheduler."""
    made = schedule(name, (1,) * 4, CHAIN, minibatches, microbatches, joint_norm=joint_norm)
    made = Schedule(replace(made.spec, order="merged"), minibatches)
    return Orders.made(made, [[0], [1], [1], [0]])


def checked(orders: Orders) -> object:
    return check_ranks(orders.schedule, orders.actions, orders.assignment)


def words(actions: list[Action], *kinds: Kind) -> str:
    return " ".join(str(action) for action in actions if not kinds or action.kind in kinds)


# Where it stands -----------------------------------------------------------------


def test_it_stands_between_the_all_reduce_and_the_update() -> None:
    made = schedule("flush", (2, 1), [(0, 1)], 6, 4, joint_norm=True)
    assert words(made.actions((0, 1)), *CLOSING) == (
        "0.1AR0/4@1 0.1N0/4@1 0.1U0/4@1 0.1AR4/2@2 0.1N4/2@2 0.1U4/2@2"
    )
    assert words(made.actions((1, 0)), *CLOSING) == "1N0/4@1 1U0/4@1 1N4/2@2 1U4/2@2"


def test_updates_of_a_rank_follow_its_last_norm() -> None:
    orders = with_norm(interleaved(2, 4, 2, 2))
    assert words(orders.actions[0][-7:]) == "0RG0<1 0B0 0RG1<1 0B1 0N0/2@1 0U0/2@1 2U0/2@1"
    assert "2SG1>1 2N0/2@1 0RG0<1" in words(orders.actions[0])


def test_passes_of_the_next_round_come_between_norm_and_update() -> None:
    """With 2bw; those of stage 3 count for the next round."""
    listed = words(merged("2bw").actions[0], F, B, *CLOSING)
    assert "3B3 3N0/4@1 0B2 3F4 0F6 3B4 0B3 0N0/4@1 0U0/4@1 3U0/4@1 3F5" in listed


def test_what_closes_a_round_waits_behind_the_update_before_it() -> None:
    """Replica 1 of stage 0 has no minibatch of rounds 0 and 2: it would come to two norms in turn,
    while stage 1, on its rank, has not come to the first.
    """
    made = schedule("flush", (2, 1), [], 3, 1, joint_norm=True)
    passes = [((1, 0), Step(0, kind, 0, 0)) for kind in (F, B)]
    passes += [((s, 1 - s), Step(0, kind, 1, 1)) for s in (0, 1) for kind in (F, B)]
    passes += [((1, 0), Step(0, kind, 2, 2)) for kind in (F, B)]
    alone = [((0, 0), Step(0, kind, b, b)) for b in (0, 2) for kind in (F, B)]
    orders = Orders.of(made, [[0, 1], [1]], lambda rank: iter(passes if rank else alone))
    checked(orders)
    assert words(orders.actions[1]) == (
        "1F0 1B0 0.1AR0@1 0.1N0@1 1N0@1 0.1U0@1 1U0@1"
        " 0.1F1@1 0.1B1@1 1F1@1 1B1@1 0.1AR1@2 0.1N1@2 1N1@2 0.1U1@2 1U1@2"
        " 1F2@2 1B2@2 0.1AR2@3 0.1N2@3 1N2@3 0.1U2@3 1U2@3"
    )


def test_it_reads_back() -> None:
    assert parse_action("0.1N4/3@2") == Action(Kind.NORM, 0, 1, 4, 2, None, 3)


def test_stages_that_update_by_themselves_have_none() -> None:
    with pytest.raises(AssertionError, match="the same minibatches"):
        schedule("weight-stashing", (1, 1), [(0, 1)], 8, joint_norm=True)


# Sound ---------------------------------------------------------------------------


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_sound_with_any_links(data: st.DataObject) -> None:
    """And nothing is held for longer."""
    stages = data.draw(st.integers(1, 5))
    replicas = data.draw(st.tuples(*[st.integers(1, 4)] * stages))
    pairs = list(combinations(range(stages), 2))
    links = data.draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    tied = data.draw(st.sampled_from([(), (0, stages - 1)])) if stages > 1 else ()
    name = data.draw(st.sampled_from(UNIFORM))
    sizes = data.draw(st.integers(0, 25)), data.draw(st.integers(1, 7))
    one, other = (
        schedule(name, replicas, links, *sizes, tied=tied, joint_norm=norm)
        for norm in (True, False)
    )
    assert check(one) == check(other)
    checked(halved(one))


@pytest.mark.parametrize("name", UNIFORM)
def test_sound_where_stages_share_a_rank(name: ScheduleName) -> None:
    assert checked(merged(name, 22)) == checked(merged(name, 22, joint_norm=False))


def test_sound_in_other_orders() -> None:
    for ranks, chunks in ((1, 2), (2, 2), (2, 3), (3, 2)):
        checked(with_norm(interleaved(ranks, ranks * chunks, 4 * ranks, 2 * ranks)))
    checked(with_norm(zero_bubble(3, 10, 4)))


# Wrong ---------------------------------------------------------------------------


def complaint(orders: Orders, rank: int, change: Callable[[list[Action]], None]) -> str:
    """What the checker says once the actions of a rank have gone through `change`."""
    checked(orders)
    listed = list(orders.actions[rank])
    change(listed)
    with pytest.raises(UnsoundError) as caught:
        checked(Orders(orders.schedule, orders.ranks, {**orders.actions, rank: listed}))
    return str(caught.value).splitlines()[0]


def moved(action: str, before: str) -> Callable[[list[Action]], None]:
    def move(listed: list[Action]) -> None:
        listed.remove(parse_action(action))
        listed.insert(listed.index(parse_action(before)), parse_action(action))

    return move


def straight(replicas: tuple[int, ...] = (1, 1)) -> Orders:
    """Flush, two stages of each one worker on a rank, or as many as are said."""
    made = schedule("flush", replicas, [(0, 1)], 8, 4, joint_norm=True)
    return Orders.made(made, [range(replicas[0]), range(replicas[0], sum(replicas))])


def test_a_norm_before_something_that_another_rank_needs_is_a_deadlock() -> None:
    """Stage 1 would wait for stage 0, which waits for its gradient."""
    said = complaint(straight(), 1, moved("1N0/4@1", before="1SG3>0"))
    assert said == "worker 0 at 0RG3<1: deadlock: waits for ever"


def test_a_last_norm_of_a_rank_before_something_that_another_rank_needs_is_a_deadlock() -> None:
    """The norm of stage 2 alone keeps nobody waiting: see where stages 0 and 2 change places."""
    orders = with_norm(interleaved(2, 4, 2, 2))
    early = moved("1N0/2@1", before="1SG1>0")
    assert complaint(orders, 1, early).endswith("at 0RG1<1: deadlock: waits for ever")
    listed = list(orders.actions[1])
    moved("3N0/2@1", before="3SG1>2")(listed)
    checked(Orders(orders.schedule, orders.ranks, {**orders.actions, 1: listed}))


def test_an_update_before_the_other_stages_have_come_is_found() -> None:
    """As if it had no norm to share: stage 2 is done first."""
    orders = with_norm(interleaved(2, 4, 2, 2))
    said = complaint(orders, 0, moved("2U0/2@1", before="0RG0<1"))
    assert said == "worker 2 at 2U0/2@1: update before its norm"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (0, "worker 0 at 0U0/4@1: update before its norm"),
        (2, "worker 0 at 0N0/4@1: norm twice"),
    ],
)
def test_a_norm_that_is_missing_or_there_twice_is_found(wrong: int, problem: str) -> None:
    def change(listed: list[Action]) -> None:
        position = listed.index(parse_action("0N0/4@1"))
        listed[position : position + 1] = listed[position : position + 1] * wrong

    assert complaint(straight(), 0, change) == problem


def test_a_norm_before_its_all_reduce_is_found() -> None:
    said = complaint(straight((2, 1)), 0, moved("0N0/4@1", before="0AR0/4@1"))
    assert said == "worker 0 at 0N0/4@1: norm before its all-reduce"


def test_a_norm_that_nobody_asks_for_is_found() -> None:
    orders, plain = straight(), schedule("flush", (1, 1), [(0, 1)], 8, 4)
    with pytest.raises(UnsoundError, match=r"worker 1 at 1N0/4@1: a norm that nobody asks for"):
        check_actions(plain, {(s, 0): orders.actions[s] for s in (0, 1)})


def test_a_version_that_the_norm_of_another_stage_keeps_from_being_made_is_found() -> None:
    """Stage 1 would go on with its next round before stage 0, on its rank, has begun the first."""
    made = schedule("flush", (1, 1), [], 2, 1, joint_norm=True)
    passes = [((s, 0), Step(0, kind, b, b)) for s in (1, 0) for b in (0, 1) for kind in (F, B)]
    orders = Orders.of(made, [[0], [0]], lambda rank: iter(passes))
    with pytest.raises(UnsoundError, match=r"1F1@1: its update waits for the norm of other stages"):
        checked(orders)


@pytest.mark.parametrize(
    "orders",
    [straight((2, 1)), with_norm(interleaved(2, 4, 4, 4)), merged("2bw")],
    ids=["replicas", "interleaved", "2bw"],
)
def test_whatever_closes_a_round_and_is_dropped_or_doubled_is_found(orders: Orders) -> None:
    for rank, actions in orders.actions.items():
        for position, action in enumerate(actions):
            for times in (0, 2) if action.kind in CLOSING else ():

                def change(listed: list[Action], at: int = position, times: int = times) -> None:
                    listed[at : at + 1] = listed[at : at + 1] * times

                complaint(orders, rank, change)
