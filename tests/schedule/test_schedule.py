"""The schedule against literal diagrams, closed formulas and the checker; the checker against
schedules made wrong on purpose.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from dataclasses import replace
from math import lcm
from textwrap import dedent

import pytest
from amount import examples
from charts import chart
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import policy, schedule

from pipedream.graph.choices import SCHEDULES
from pipedream.schedule.action import Action, Kind, parse_action
from pipedream.schedule.checker import UnsoundError, check, check_actions
from pipedream.schedule.in_flight import steady_in_flight, warm_up
from pipedream.schedule.policy import Peak, VerticalSync
from pipedream.schedule.schedule import Schedule

PASSES = (Kind.FORWARD, Kind.BACKWARD)


def chain(stages):
    return [(stage, stage + 1) for stage in range(stages - 1)]


def drawn(name, replicas, minibatches, microbatches=1, max_in_flight=None):
    links = chain(len(replicas))
    made = schedule(name, replicas, links, minibatches, microbatches, max_in_flight=max_in_flight)
    return "\n".join(" ".join(line.split()) for line in chart(made).splitlines())


def diagram(text):
    return "\n".join(" ".join(line.split()) for line in dedent(text).strip().splitlines())


# Literal diagrams ------------------------------------------------------------


def test_two_stages():
    assert drawn("weight-stashing", (1, 1), 5) == diagram("""
        0  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4
        1  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
    """)


def test_three_stages_fill_up_and_then_alternate():
    assert drawn("weight-stashing", (1, 1, 1), 5) == diagram("""
        0  F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4
        1  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4
        2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
    """)


def test_replicas_wait_for_each_other_after_each_round():
    """A pass of a stage of two replicas takes two units: nobody waits in the steady state."""
    assert drawn("weight-stashing", (2, 1), 7) == diagram("""
        0    F0 -  F2 -  B0 -  .  .  F4 -  B2 -  F6 -  B4 -  B6 -
        0.1  F1 -  F3 -  .  .  B1 -  F5 -  B3 -  .  .  B5 -
        1    .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6
    """)


def test_one_stage_feeds_two_replicas():
    assert drawn("weight-stashing", (1, 2), 8) == diagram("""
        0    F0 F1 F2 F3 .  B0 F4 B1 F5 .  B2 F6 B3 F7 B4 B5 .  .  B6 B7
        1    .  F0 -  B0 -  .  F2 -  B2 -  F4 -  B4 -  F6 -  B6 -
        1.1  .  .  F1 -  B1 -  F3 -  B3 -  F5 -  B5 -  F7 -  B7 -
    """)


def test_with_less_room_they_wait():
    assert drawn("weight-stashing", (1, 2), 6, max_in_flight=(3, 1)) == diagram("""
        0    F0 F1 F2 .  .  B0 F3 B1 F4 .  B2 F5 B3 .  .  B4 B5
        1    .  F0 -  B0 -  .  F2 -  B2 -  .  F4 -  B4 -
        1.1  .  .  F1 -  B1 -  .  F3 -  B3 -  .  F5 -  B5 -
    """)


def test_replicas_that_do_not_divide_each_other():
    assert drawn("weight-stashing", (3, 2), 8) == diagram("""
        0    F0 -  -  F3 -  -  F6 -  -  B0 -  -  .  .  B3 -  -  .  .  B6 -  -
        0.1  F1 -  -  F4 -  -  F7 -  -  B1 -  -  .  .  .  B4 -  -  .  B7 -  -
        0.2  F2 -  -  F5 -  -  .  .  .  .  .  B2 -  -  .  B5 -  -
        1    .  .  .  F0 -  B0 -  F2 -  B2 -  F4 -  B4 -  F6 -  B6 -
        1.1  .  .  .  F1 -  B1 -  F3 -  B3 -  F5 -  B5 -  F7 -  B7 -
    """)


def test_flush_drains_between_rounds():
    assert drawn("flush", (1, 1), 5, microbatches=2) == diagram("""
        0  F0 F1 .  B0 .  B1 F2 F3 .  B2 .  B3 F4 .  .  B4
        1  .  F0 B0 F1 B1 .  .  F2 B2 F3 B3 .  .  F4 B4
    """)


def test_flush_with_replicas_begins_a_round_when_all_are_done():
    assert drawn("flush", (2, 1), 6, microbatches=3) == diagram("""
        0    F0 -  F2 -  B0 -  .  .  B2 -  F4 -  .  .  .  .  B4 -
        0.1  F1 -  .  .  .  .  B1 -  .  .  F3 -  F5 -  B3 -  .  .  B5 -
        1    .  .  F0 B0 F1 B1 F2 B2 .  .  .  .  F3 B3 F4 B4 F5 B5
    """)


def test_gpipe_goes_all_forward_and_then_back_in_reverse():
    assert drawn("gpipe", (1, 1), 5, microbatches=3) == diagram("""
        0  F0 F1 F2 .  .  B2 B1 B0 F3 F4 .  .  B4 B3
        1  .  F0 F1 F2 B2 B1 B0 .  .  F3 F4 B4 B3
    """)


def test_2bw_never_empties():
    """The weights are those of the round before: the first of them serve two rounds."""
    made = schedule("2bw", (1, 1), chain(2), 7, 2)
    assert drawn("2bw", (1, 1), 7, 2) == drawn("weight-stashing", (1, 1), 7)
    for worker in made.workers:
        versions = {a.minibatch: a.version for a in made.actions(worker) if a.kind in PASSES}
        assert list(versions.values()) == [0, 0, 0, 0, 1, 1, 2]


def test_2bw_with_few_microbatches_waits_for_its_versions():
    assert drawn("2bw", (1, 1, 1), 4, 1) == diagram("""
        0  F0 F1 .  .  .  B0 F2 .  .  B1 F3 .  .  B2 .  B3
        1  .  F0 F1 .  B0 .  .  F2 B1 .  .  F3 B2 .  B3
        2  .  .  F0 B0 F1 B1 .  .  F2 B2 .  .  F3 B3
    """)


def test_vertical_sync_runs_a_minibatch_on_weights_of_one_age():
    """Version v of stage 0 knows 2 v minibatches, of stage 1 3 v and of stage 2 v; six of them are
    in flight on each worker of stage 0, so the first to run on version 1 is the thirteenth.
    """
    made = schedule("vertical-sync", (2, 3, 1), chain(3), 16)
    versions = {}
    for worker in made.workers:
        for action in made.actions(worker):
            if action.kind is Kind.FORWARD:
                versions.setdefault(action.minibatch, {})[action.stage] = action.version
    assert [tuple(versions[b][stage] for stage in range(3)) for b in range(16)] == (
        12 * [(0, 0, 0)] + 2 * [(1, 0, 2)] + 2 * [(2, 1, 4)]
    )


def test_actions_around_the_passes():
    made = schedule("weight-stashing", (2, 1), chain(2), 3)
    assert " ".join(map(str, made.actions((0, 0)))) == (
        "0F0 0SA0>1 0F2 0SA2>1 0RG0<1 0B0 0AR0/2@1 0U0/2@1 0RG2<1 0B2 0AR2@2 0U2@2"
    )
    assert " ".join(map(str, made.actions((0, 1)))) == (
        "0.1F1 0.1SA1>1 0.1RG1<1 0.1B1 0.1AR0/2@1 0.1U0/2@1 0.1AR2@2 0.1U2@2"
    )
    assert " ".join(map(str, made.actions((1, 0)))) == (
        "1RA0<0 1F0 1B0 1SG0>0 1U0@1 "
        "1RA1@1<0.1 1F1@1 1B1@1 1SG1@1>0.1 1U1@2 "
        "1RA2@2<0 1F2@2 1B2@2 1SG2@2>0 1U2@3"
    )


# Closed formulas -------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_versions_of_a_chain_are_those_of_weight_stashing(stages):
    """w(t+1) = w(t) - lr * grad f(w_1(t-n+1), ..., w_n(t))."""
    made = schedule("weight-stashing", (1,) * stages, chain(stages), 20)
    for stage in range(stages):
        for action in made.actions((stage, 0)):
            if action.kind in PASSES:
                assert action.version == max(0, action.minibatch - (stages - 1 - stage))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_versions_of_a_chain_are_those_of_vertical_sync(stages):
    """w(t+1) = w(t) - lr * grad f(w_1(t-n+1), ..., w_n(t-n+1))."""
    made = schedule("vertical-sync", (1,) * stages, chain(stages), 20)
    for worker in made.workers:
        for action in made.actions(worker):
            if action.kind in PASSES:
                assert action.version == max(0, action.minibatch - (stages - 1))


@pytest.mark.parametrize("replicas", [(1,), (1, 1), (1, 1, 1, 1), (4, 3, 1), (1, 3, 2)])
@pytest.mark.parametrize("more", [0, 3])
def test_versions_of_2bw(replicas, more):
    """W(t+1) = W(t) - lr * grad f(W(t-1))."""
    size = policy("2bw", replicas).least_microbatches + more
    made = schedule("2bw", replicas, chain(len(replicas)), 4 * size + 1, size)
    for worker in made.workers:
        for action in made.actions(worker):
            if action.kind in PASSES:
                assert action.version == max(0, action.minibatch // size - 1)


# Pace ------------------------------------------------------------------------


def pace(name, replicas, microbatches=1, max_in_flight=None):
    """Units from one minibatch to the next in the steady state: a minibatch takes each worker 2 for
    each replica of its stage, so with nobody waiting it is 2.
    """
    turn = lcm(*replicas, microbatches)
    deepest = steady_in_flight(replicas, synchronized=True)[0] * replicas[0]
    filled = turn * (4 - 3 * (-deepest // turn))
    minibatches = 2 * filled + 3 * turn
    links = chain(len(replicas))
    made = schedule(name, replicas, links, minibatches, microbatches, max_in_flight=max_in_flight)
    begins = {
        step.minibatch: step.time
        for worker, steps in made.steps.items()
        for step in steps
        if step.kind is Kind.BACKWARD and worker[0] == 0
    }
    return (begins[filled + 2 * turn] - begins[filled]) / (2 * turn)


UP_TO_FOUR = [
    replicas for stages in range(1, 5) for replicas in itertools.product(range(1, 5), repeat=stages)
]


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["weight-stashing", "vertical-sync"])
def test_nobody_waits_in_the_steady_state(name):
    assert {pace(name, replicas) for replicas in UP_TO_FOUR} == {2}


@pytest.mark.thorough
@pytest.mark.slow
def test_nobody_waits_with_2bw_whose_rounds_are_whole_turns():
    for replicas in UP_TO_FOUR:
        turn = lcm(*replicas)
        in_flight = steady_in_flight(replicas, synchronized=True)
        most = max(n * r for n, r in zip(in_flight, replicas, strict=True))
        assert pace("2bw", replicas, turn * -(-most // turn)) == 2


@pytest.mark.thorough
@pytest.mark.slow
def test_nobody_waits_within_a_long_round_of_flush():
    for replicas in UP_TO_FOUR:
        count = 24 * lcm(*replicas)
        made = schedule("flush", replicas, chain(len(replicas)), count, count)
        ends = max(steps[-1].time for steps in made.steps.values())
        filling = 4 * (
            sum(replicas) + steady_in_flight(replicas, synchronized=False)[0] * replicas[0]
        )
        assert ends <= 2 * count + filling


@pytest.mark.slow
def test_one_less_in_flight_at_the_first_stage_and_somebody_waits():
    for replicas in UP_TO_FOUR:
        first, *others = steady_in_flight(replicas, synchronized=True)
        if first > 1:
            assert pace("weight-stashing", replicas, max_in_flight=(first - 1, *others)) > 2


def test_warm_up():
    assert [warm_up((1, 1, 1), stage) for stage in range(3)] == [3, 2, 1]
    assert [warm_up((4, 3, 1), stage) for stage in range(3)] == [2, 2, 1]
    assert [warm_up((1, 5, 2), stage) for stage in range(3)] == [8, 2, 1]
    for synchronized in (True, False):
        assert steady_in_flight((1, 1, 1), synchronized) == (3, 2, 1)
        assert steady_in_flight((15, 1), synchronized) == (2, 1)
    assert steady_in_flight((4, 3, 1), synchronized=True) == (4, 2, 1)
    assert steady_in_flight((4, 3, 1), synchronized=False) == (3, 2, 1)
    assert steady_in_flight((1, 5, 2), synchronized=True) == (20, 3, 1)
    assert steady_in_flight((1, 5, 2), synchronized=False) == (11, 2, 1)


def test_what_workers_hold():
    assert check(schedule("weight-stashing", (1, 1, 1), chain(3), 9)) == {
        (0, 0): Peak(in_flight=3, versions=3),
        (1, 0): Peak(in_flight=2, versions=2),
        (2, 0): Peak(in_flight=1, versions=1),
    }
    assert check(schedule("flush", (1, 1), chain(2), 9, 3)) == {
        (0, 0): Peak(in_flight=2, versions=1),
        (1, 0): Peak(in_flight=1, versions=1),
    }
    assert check(schedule("gpipe", (2, 1), chain(2), 10, 5)) == {
        (0, 0): Peak(in_flight=3, versions=1),
        (0, 1): Peak(in_flight=3, versions=1),
        (1, 0): Peak(in_flight=5, versions=1),
    }
    assert check(schedule("2bw", (1, 1, 1), chain(3), 12, 3)) == {
        (0, 0): Peak(in_flight=3, versions=2),
        (1, 0): Peak(in_flight=2, versions=2),
        (2, 0): Peak(in_flight=1, versions=2),
    }
    assert check(schedule("vertical-sync", (1, 1, 1), chain(3), 9)) == {
        (0, 0): Peak(in_flight=3, versions=3),
        (1, 0): Peak(in_flight=2, versions=3),
        (2, 0): Peak(in_flight=1, versions=3),
    }


# Soundness -------------------------------------------------------------------


@pytest.mark.one_in(20)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_sound_for_all_plans_of_six_stages(name, first):
    """Of up to six stages with up to four replicas each: 5,460 plans, all of which pd-train takes.
    The last round is not a whole one. Long enough for the least that fills a pipeline, and with 2bw
    for passes on the second version; those of up to three stages go on for long below.

    Plans of up to five stages with every schedule. Each of the 4,096 plans of six stages with one
    of the five schedules, by the sum of its replicas modulo 5: so any replicas of any four of its
    stages come together under every schedule (a covering array of strength 4, since two numbers
    from 1 to 4 have sums of every remainder).
    """
    for stages in range(1, 7):
        links = chain(stages)
        for others in itertools.product(range(1, 5), repeat=stages - 1):
            replicas = (first, *others)
            if stages == 6 and SCHEDULES[sum(replicas) % 5] != name:
                continue
            fill = warm_up(replicas, 0) * first
            microbatches = max(4, policy(name, replicas).least_microbatches)
            minibatches = fill + max(replicas) + 1 + microbatches - 4
            check(schedule(name, replicas, links, minibatches, microbatches))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_sound_with_any_room(name):
    """From a single minibatch in flight on each worker to more than are of use."""
    for replicas in itertools.product(range(1, 4), repeat=3):
        for max_in_flight in itertools.product((1, 2, 5), repeat=3):
            check(schedule(name, replicas, chain(3), 19, 4, max_in_flight=max_in_flight))


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_sound_for_any_number_of_minibatches(name, stages):
    for replicas in itertools.product(range(1, 5), repeat=stages):
        least = policy(name, replicas).least_microbatches
        long = 3 * max(least, steady_in_flight(replicas, synchronized=True)[0] * replicas[0]) + 2
        for minibatches, microbatches in ((0, 4), (1, 1), (3, 4), (13, 3), (long, least)):
            check(schedule(name, replicas, chain(stages), minibatches, microbatches))


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_sound_with_skips(name):
    """Every stage sends to every later one, or to the last beside the next."""
    for replicas in itertools.product(range(1, 4), repeat=4):
        check(schedule(name, replicas, list(itertools.combinations(range(4), 2)), 19, 4))
        check(schedule(name, replicas, [*chain(4), (0, 3), (1, 3)], 19, 4))


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_sound_with_any_links(data):
    stages = data.draw(st.integers(1, 5))
    replicas = data.draw(st.tuples(*[st.integers(1, 5)] * stages))
    pairs = list(itertools.combinations(range(stages), 2))
    links = data.draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    name = data.draw(st.sampled_from(SCHEDULES))
    check(
        schedule(name, replicas, links, data.draw(st.integers(0, 30)), data.draw(st.integers(1, 7)))
    )


@pytest.mark.parametrize("name", ["flush", "gpipe", "2bw"])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1, 3), (1, 2, 1, 2)])
def test_sound_with_tied_stages(name, replicas):
    """Stages that share weights reduce together, even where each has one replica, or is a team."""
    last = len(replicas) - 1
    made = schedule(name, replicas, chain(len(replicas)), 11, 4, tied=(0, last))
    check(made)
    check(Schedule(replace(made.spec, teams=(0, 1), joint_norm=True), 11))
    assert "0AR0/4@1" in map(str, made.actions((0, 0)))
    actions = {worker: made.actions(worker) for worker in made.workers}
    del actions[0, 0][find(actions[0, 0], "0AR0/4@1")]
    with pytest.raises(UnsoundError, match="update before its all-reduce"):
        check_actions(made, actions)


def test_messages_of_a_channel_have_one_order():
    made = schedule("weight-stashing", (4, 3, 1), [(0, 1), (1, 2), (0, 2)], 40)
    for worker in made.workers:
        sent = {}
        for action in made.actions(worker):
            if action.peer is not None:
                sent.setdefault((action.kind, action.peer), []).append(action.minibatch)
        assert all(order == sorted(order) for order in sent.values())


def test_last_round_is_the_mean_of_what_exists():
    made = schedule("flush", (3,), [], 8, 4)
    for replica in range(3):
        updates = [a for a in made.actions((0, replica)) if a.kind is Kind.UPDATE]
        assert [(a.minibatch, a.divisor, a.version) for a in updates] == [(0, 4, 1), (4, 4, 2)]
    made = schedule("flush", (3,), [], 5, 4)
    assert [str(action) for action in made.actions((0, 2))] == [
        *("0.2F2", "0.2B2", "0.2AR0/4@1", "0.2U0/4@1", "0.2AR4@2", "0.2U4@2"),
    ]


def test_no_minibatches_no_actions():
    made = schedule("weight-stashing", (2, 1), chain(2), 0)
    assert [made.actions(worker) for worker in made.workers] == [[], [], []]
    assert chart(made).split() == ["0", "0.1", "1"]


@pytest.mark.thorough
@pytest.mark.slow
def test_long_epoch_on_ten_workers_is_quick():
    began = time.process_time()
    made = schedule("weight-stashing", (4, 3, 2, 1), chain(4), 20_000)
    assert sum(len(made.actions(worker)) for worker in made.workers) > 400_000
    assert time.process_time() - began < 10


@pytest.mark.slow
def test_needs_no_torch():
    code = "import sys, pipedream.schedule.checker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Text ------------------------------------------------------------------------


def test_actions_print_shortly():
    assert str(Action(Kind.FORWARD, 2, 0, 0, 0)) == "2F0"
    assert str(Action(Kind.SEND_ACTIVATION, 0, 1, 5, 3, (1, 2))) == "0.1SA5@3>1.2"
    assert str(Action(Kind.ALL_REDUCE, 0, 1, 4, 2, divisor=3)) == "0.1AR4/3@2"


@pytest.mark.parametrize("replicas", [(1, 1), (4, 3, 1), (12, 1)])
def test_actions_read_back(replicas):
    made = schedule("weight-stashing", replicas, chain(len(replicas)), 30)
    for worker in made.workers:
        for action in made.actions(worker):
            assert parse_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0@", "2F0 ", "-1F0", "2SA1>"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match=r"action|Kind"):
        parse_action(text)


# Mutations -------------------------------------------------------------------


def broken(name, replicas, mutate, links=None):
    """The complaint about a schedule whose lists went through `mutate`."""
    made = schedule(name, replicas, links or chain(len(replicas)), 8, 4)
    actions = {worker: made.actions(worker) for worker in made.workers}
    mutate(actions)
    with pytest.raises(UnsoundError) as caught:
        check_actions(made, actions)
    return str(caught.value)


def find(actions, text):
    return [str(action) for action in actions].index(text)


def test_a_dropped_send_is_a_deadlock():
    def drop(actions):
        del actions[0, 0][find(actions[0, 0], "0SA2@1>1")]

    complaint = broken("weight-stashing", (1, 1), drop)
    assert "worker 1 at 1RA2@2<0: minibatch 3 comes first" in complaint

    def drop_last(actions):
        del actions[0, 0][find(actions[0, 0], "0SA7@6>1")]

    complaint = broken("weight-stashing", (1, 1), drop_last)
    assert "worker 0 at 0RG7@6<1: deadlock: waits for ever\n" in complaint
    assert "0SG6" not in complaint
    assert "  1     1F6@6 1B6@6 1SG6@6>0 1U6@7 | 1RA7@7<0 1F7@7 1B7@7 1SG7@7>0" in complaint


def test_circular_waiting_is_a_deadlock():
    def swap(actions):
        actions[0, 0].remove(parse_action("0RG0<1"))
        actions[0, 0].insert(0, parse_action("0RG0<1"))

    assert "worker 0 at 0RG0<1: deadlock" in broken("weight-stashing", (1, 1), swap)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 3), (2, 3, 1)])
def test_every_dropped_or_doubled_action_is_noticed(name, replicas):
    made = schedule(name, replicas, chain(len(replicas)), 8, 4)
    for worker in made.workers:
        for position in range(len(made.actions(worker))):

            def drop(actions, worker=worker, position=position):
                del actions[worker][position]

            def double(actions, worker=worker, position=position):
                actions[worker].insert(position, actions[worker][position])

            broken(name, replicas, drop)
            broken(name, replicas, double)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1)])
def test_swaps_that_matter_are_noticed(replicas):
    """Swapping neighbours that depend on each other; a message and an unrelated pass may swap."""
    made = schedule("weight-stashing", replicas, chain(len(replicas)), 8)
    for worker in made.workers:
        listed = made.actions(worker)
        for position, (one, two) in enumerate(itertools.pairwise(listed)):
            same = one.minibatch == two.minibatch and one.version == two.version
            if not (same or Kind.UPDATE in (one.kind, two.kind)):
                continue
            if {one.kind, two.kind} & {Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT} and not same:
                continue
            if {one.kind, two.kind} & {Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT} and not same:
                continue

            def swap(actions, worker=worker, position=position):
                pair = actions[worker][position : position + 2]
                actions[worker][position : position + 2] = reversed(pair)

            broken("weight-stashing", replicas, swap)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("version", 7, "weight-stashing wants version 0"),
        ("minibatch", 0, "forward twice"),
        ("minibatch", 5, "a minibatch of another replica"),
        ("replica", 1, "an action of another worker"),
        ("stage", 1, "an action of another worker"),
    ],
)
def test_wrong_fields_are_named(field, value, problem):
    def change(actions):
        position = find(actions[0, 0], "0F2")
        actions[0, 0][position] = actions[0, 0][position]._replace(**{field: value})

    assert problem in broken("weight-stashing", (2, 1), change)


def test_a_round_that_replicas_disagree_on_is_named():
    def change(actions):
        position = find(actions[0, 1], "0.1AR0/2@1")
        actions[0, 1][position] = actions[0, 1][position]._replace(divisor=1)

    complaint = broken("weight-stashing", (2, 1), change)
    assert "0.1AR0@1: expected (0, 2, 1), found (0, 1, 1)" in complaint


def test_more_in_flight_than_allowed_is_noticed():
    """Another pipeline's longer warm-up is refused by the limits of this one."""
    longer = schedule("weight-stashing", (1, 1, 1), chain(3), 8)
    deep = [
        a for a in longer.actions((0, 0)) if a.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)
    ]
    alone = schedule("weight-stashing", (1,), [], 8)
    with pytest.raises(UnsoundError, match="more than 1 in flight"):
        check_actions(alone, {(0, 0): deep})


def test_more_versions_than_allowed_are_noticed(monkeypatch):
    monkeypatch.setattr(VerticalSync, "versions", lambda policy, stage: 2)
    with pytest.raises(UnsoundError, match="worker 2 at 2U1@2: more than 2 versions alive"):
        check(schedule("vertical-sync", (1, 1, 1), chain(3), 8))


@pytest.mark.parametrize("name", ["weight-stashing", "vertical-sync"])
@pytest.mark.parametrize("replicas", [(1,), (1, 1, 1), (2, 1), (1, 3, 2), (4, 3, 1)], ids=str)
@pytest.mark.parametrize("accumulate", [2, 3])
def test_several_minibatches_of_a_worker_to_an_update_are_sound(name, replicas, accumulate):
    """The last round is ragged: 41 is no multiple of any of them."""
    links = [(stage, stage + 1) for stage in range(len(replicas) - 1)]
    made = schedule(name, replicas, links, 41, accumulate=accumulate)
    check(made)
    for stage, count in enumerate(replicas):
        updates = [a for a in made.actions((stage, 0)) if a.kind is Kind.UPDATE]
        assert len(updates) == -(-41 // (count * accumulate))
