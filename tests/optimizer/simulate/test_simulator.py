"""Timelines worked out by hand: a column is a second, a dot a second of waiting."""

from dataclasses import replace
from itertools import pairwise
from textwrap import dedent

import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import PASSES, interleaved, zero_bubble
from plans import make_plan
from schedules import policy, schedule

from pipedream.graph.choices import MICROBATCHES, SCHEDULES
from pipedream.graph.cluster import Cluster, DeviceType
from pipedream.graph.model import Graph, Node
from pipedream.graph.plan import StageMemory
from pipedream.graph.profile import TrainingOverheads
from pipedream.optimizer.cost.memory import HeldBytes
from pipedream.optimizer.cost.models import PaperCost
from pipedream.optimizer.search.outcome import fixed_outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulator import simulate, simulate_plan
from pipedream.optimizer.simulate.workload import StageWork, Workload
from pipedream.schedule.action import Kind
from pipedream.schedule.checker import check
from pipedream.schedule.in_flight import warm_up
from pipedream.schedule.policy import Peak
from pipedream.schedule.steady_state import SteadySpan

FREE = 1e30


def chain(*stages, message=0.0):
    """Stages of (forward, backward) seconds or StageWork, `message` bytes both ways between."""
    works = tuple(s if isinstance(s, StageWork) else StageWork(*s) for s in stages)
    links = dict.fromkeys(zip(range(len(works)), range(1, len(works)), strict=False), message)
    return Workload(works, links, links)


def run(workload, replicas, minibatches=None, bandwidth=FREE, name="weight-stashing", micro=1):
    span = SteadySpan.for_simulation(policy(name, replicas, micro))
    if minibatches is not None:
        span = SteadySpan(minibatches, 1, minibatches)
    made = schedule(name, replicas, tuple(workload.forward_bytes), span.minibatches, micro)
    workers = sum(replicas)
    numbers = iter(range(workers))
    ranks = [[next(numbers) for _ in range(count)] for count in replicas]
    cluster = Cluster(machines=(workers,), bandwidth=(bandwidth,))
    return simulate(made, workload, cluster, ranks, span)


def chart(simulation):
    lines = []
    for _, events in sorted(simulation.events.items()):
        cells = ["."] * round(events[-1].end)
        for action, begin, end in events:
            text = "AR" if action.kind is Kind.ALL_REDUCE else f"{action.kind}{action.minibatch}"
            if action.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.ALL_REDUCE):
                assert begin == pytest.approx(round(begin)), action
                cells[round(begin) : round(end)] = [text] * round(end - begin)
        lines.append(" ".join(cell.ljust(2) for cell in cells).rstrip())
    return "\n".join(lines)


def drawn(text):
    return dedent(text).strip()


def test_two_stages_and_messages_of_a_second():
    found = run(chain((1, 1), (1, 1), message=10), (1, 1), minibatches=4, bandwidth=10)
    assert chart(found) == drawn("""
        F0 F1 .  .  .  B0 F2 B1 F3 .  .  B2 .  B3
        .  .  F0 B0 F1 B1 .  .  F2 B2 F3 B3
    """)


def test_three_stages_with_backward_passes_of_two_seconds():
    found = run(chain((1, 2), (1, 2), (1, 2)), (1, 1, 1), minibatches=4)
    assert chart(found) == drawn("""
        F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
        .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
    """)


def test_two_replicas_wait_for_each_other_and_reduce_for_a_second():
    first = StageWork(2, 2, parameter_bytes=10)
    found = run(chain(first, (1, 1)), (2, 1), minibatches=4, bandwidth=10)
    assert chart(found) == drawn("""
        F0 F0 F2 F2 B0 B0 AR AR AR B2 B2 AR AR
        F1 F1 F3 F3 .  .  B1 B1 AR .  B3 B3 AR
        .  .  F0 B0 F1 B1 F2 B2 F3 B3
    """)


def test_flush_fills_and_drains_in_every_round():
    found = run(chain((1, 1), (1, 1)), (1, 1), minibatches=4, name="flush", micro=2)
    assert chart(found) == drawn("""
        F0 F1 .  B0 .  B1 F2 F3 .  B2 .  B3
        .  F0 B0 F1 B1 .  .  F2 B2 F3 B3
    """)


def test_the_first_minibatch_of_a_round_adds_no_gradients():
    """A mean of 1.5 s of a backward pass, of which 1 s adds gradients where there are some already.
    A drained pipeline waits for the last one: a round was expected to be shorter by half a second,
    and flush pipelines of two microbatches took 4 % longer than expected.
    """
    work = StageWork(1, 1.5, sum_seconds=1, sum_seconds_each=0.5)
    found = run(chain(work, work), (1, 1), minibatches=4, name="flush", micro=2)
    assert chart(found) == drawn("""
        F0 F1 .  B0 .  .  B1 B1 F2 F3 .  B2 .  .  B3 B3
        .  F0 B0 F1 B1 B1 .  .  .  F2 B2 F3 B3 B3
    """)
    alone = run(chain(work), (1,), minibatches=4, name="flush", micro=2)
    assert chart(alone) == "F0 B0 F1 B1 B1 F2 B2 F3 B3 B3"


def test_a_message_waits_for_the_one_before_it_on_the_same_port():
    # Stage 0 sends two seconds' worth every second: the second message arrives at 5, not at 4.
    found = run(chain((1, 1), (1, 1), message=20), (1, 1), minibatches=2, bandwidth=10)
    received = [e.end for e in found.events[1] if e.action.kind is Kind.RECV_ACTIVATION]
    assert received == [3.0, 5.0]


def test_a_device_twice_as_fast_takes_half_as_long():
    kinds = (DeviceType(name="slow"), DeviceType(name="fast", speed=2.0))
    cluster = Cluster(
        machines=(1, 2), bandwidth=(FREE, FREE), kinds=kinds, machine_kinds=("slow", "fast")
    )
    made = schedule("weight-stashing", (1, 1), ((0, 1),), 2)
    found = simulate(made, chain((1, 1), (2, 2)), cluster, [[0], [1]], SteadySpan(2, 1, 2))
    assert chart(found) == drawn("""
        F0 F1 .  B0 .  B1
        .  F0 B0 F1 B1
    """)


@pytest.mark.parametrize("stages", range(1, 7))
def test_a_balanced_pipeline_takes_the_time_of_a_stage(stages):
    found = run(chain(*[(1, 2)] * stages), (1,) * stages)
    assert found.seconds_per_minibatch == pytest.approx(3.0)
    assert found.bubble == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("stages", "micro"), [(1, 3), (2, 1), (2, 4), (4, 4), (4, 8), (5, 3)])
def test_the_bubble_of_a_flush(stages, micro):
    """(p - 1) / (m + p - 1): GPipe, NeurIPS 2019, section 2.3."""
    found = run(chain(*[(1, 2)] * stages), (1,) * stages, name="flush", micro=micro)
    assert found.bubble == pytest.approx((stages - 1) / (micro + stages - 1))
    assert found.seconds_per_minibatch == pytest.approx(3 * (micro + stages - 1) / micro)


def test_the_slowest_stage_sets_the_pace():
    found = run(chain((1, 1), (2, 3), (1, 1)), (1, 1, 1))
    assert found.seconds_per_minibatch == pytest.approx(5.0)
    assert found.bubble == pytest.approx(1 - 9 / 15)


def test_data_parallel_workers_share_the_minibatches_and_reduce():
    found = run(Workload((StageWork(1, 2, 0.5, parameter_bytes=40),), {}, {}), (4,), bandwidth=10)
    assert found.seconds_per_minibatch == pytest.approx((3 + 2 * 3 * 40 / 4 / 10 + 0.5) / 4)
    assert found.bubble == pytest.approx(1 - 3.5 / 9.5)


works = st.builds(
    StageWork,
    *[st.floats(0.1, 5)] * 2,
    update_seconds=st.floats(0, 1),
    parameter_bytes=st.floats(0, 50),
    memory=st.builds(HeldBytes, *[st.floats(0, 50)] * 5),
)


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.tuples(works, st.integers(1, 3)), min_size=1, max_size=4),
    st.floats(0, 50),
    st.sampled_from(SCHEDULES),
)
def test_any_pipeline(stages, message, name):
    """Every action once, in the schedule's order, none before the last; memory within the bound."""
    replicas = tuple(count for _, count in stages)
    workload = chain(*(work for work, _ in stages), message=message)
    found = run(workload, replicas, bandwidth=10, name=name, micro=2)
    made = schedule(
        name,
        replicas,
        tuple(workload.forward_bytes),
        SteadySpan.for_simulation(policy(name, replicas, 2)).minibatches,
        2,
    )
    peaks = check(made)
    for rank, worker in enumerate(made.workers):
        events, work = found.events[rank], workload.stages[worker[0]]
        assert [event.action for event in events] == made.actions(worker)
        times = [time for event in events for time in (event.begin, event.end)]
        assert times == sorted(times)
        held, peak = work.memory, peaks[worker]
        bound = held.always + (peak.versions - 1) * held.version + peak.in_flight * held.minibatch
        bound += max(held.backward, held.gradients)
        assert max(held for _, held in found.memory[rank]) <= bound * (1 + 1e-9)
    slowest = max((w.forward_seconds + w.backward_seconds) / count for w, count in stages)
    assert found.seconds_per_minibatch >= slowest * (1 - 1e-9)
    assert 0 <= found.bubble < 1


@settings(deadline=None, max_examples=examples(40))
@given(st.data())
def test_a_plans_memory_over_time_is_within_what_the_planner_says(data):
    """Whatever the cuts, replicas, schedule and sizes; and it comes close."""
    count = data.draw(st.integers(2, 6))
    sizes = st.floats(0, 100, allow_subnormal=False)  # those have no digits to compare
    nodes = {
        f"n{i}": Node(f"n{i}", "Linear", 1.0, 2.0, (data.draw(sizes),), data.draw(sizes))
        for i in range(count)
    }
    names = list(nodes)
    graph = Graph(nodes, tuple(pairwise(names)))
    ends = sorted(data.draw(st.sets(st.integers(1, count), min_size=1)) | {count})
    counts = [data.draw(st.integers(1, 3)) for _ in ends]
    request = Request(
        graph,
        Cluster(machines=(sum(counts),), bandwidth=(1e3,)),
        PaperCost(),
        schedule=data.draw(st.sampled_from(SCHEDULES)),
        optimizer=data.draw(st.sampled_from(["sgd", "adam"])),
        recompute=data.draw(st.sampled_from(["never", "always"])),
    )
    plan = fixed_outcome(request, ends, counts).plan
    found = simulate_plan(plan, graph)
    for stage in plan.stages:
        for rank in stage.ranks:
            most = max(held for _, held in found.memory[rank])
            assert most <= stage.memory_bytes * (1 + 1e-9)
            # A round of flush may have fewer minibatches than could be in flight, and of vertical
            # sync a worker may keep fewer versions than it might: 6 bytes of 13 were held by
            # replicas (3, 2, 3, 1) of equal layers.
            of_round = -(-MICROBATCHES // len(stage.ranks))
            full = request.schedule != "flush" or warm_up(plan.replicas, stage.stage) <= of_round
            if full and request.schedule != "vertical-sync":
                assert most >= 0.5 * stage.memory_bytes


def run_orders(orders, workload):
    """Of ranks whose stages follow one another, two rounds and the second of them counted."""
    made, ranks = orders.schedule, len(orders.actions)
    cluster = Cluster(machines=(ranks,), bandwidth=(FREE,))
    span = SteadySpan(made.minibatches, made.spec.microbatches, made.minibatches)
    return simulate(made, workload, cluster, orders.ranks, span, orders.actions)


@pytest.mark.parametrize(("ranks", "chunks", "micro"), [(2, 2, 4), (2, 3, 2), (4, 2, 8)])
def test_several_stages_on_a_rank_shorten_the_bubble(ranks, chunks, micro):
    """To a part in so many: (p - 1) / (v m) of the work, SC 2021, section 2.2.2. Rank by rank."""
    stages = ranks * chunks
    found = run_orders(interleaved(ranks, stages, 2 * micro, micro), chain(*[(1, 2)] * stages))
    work = 3 * chunks * micro
    assert found.seconds_per_minibatch * micro == pytest.approx(work + 3 * (ranks - 1))
    assert found.bubble == pytest.approx(3 * (ranks - 1) / (work + 3 * (ranks - 1)))
    assert sorted(found.events) == list(range(ranks))


def test_a_plan_is_simulated_in_its_own_order(make_graph):
    """It was simulated as 1F1B once, one stage on each rank: the later of two on a rank alone."""
    graph = make_graph("a b c d", "a-b b-c c-d", **dict.fromkeys("abcd", (3, 0, 0)))
    straight = make_plan(graph, ["a", "b", "c", "d"], (1, 1, 1, 1), schedule="flush")
    stages = tuple(s.model_copy(update={"ranks": (s.stage % 2,)}) for s in straight.stages)
    predicted = straight.predicted.model_copy(update={"microbatches": 4})
    plan = straight.model_copy(
        update={"stages": stages, "order": "interleaved", "predicted": predicted}
    )
    found = simulate_plan(plan, graph)
    assert sorted(found.events) == [0, 1]
    assert {event.action.stage for event in found.events[0]} == {0, 2}


def test_the_second_halves_of_backward_passes_fill_the_bubble():
    """It is (p - 1) (F + BI - BW): ICLR 2024, section 2. Gradients come earlier."""
    found = run_orders(zero_bubble(2, 8, 4), chain((1, 2), (1, 2)))
    first, second = (
        [f"{a.kind}{a.minibatch}:{begin:g}" for a, begin, _ in events if a.kind in PASSES]
        for _, events in sorted(found.events.items())
    )
    assert " ".join(first[:8]) == "F0:0 F1:1 B0:3 F2:5 B1:6 F3:8 B2:9 B3:11"
    assert " ".join(second[:12]) == (
        "F0:1 BI0:2 F1:3 BI1:4 BW0:5 F2:6 BI2:7 BW1:8 F3:9 BI3:10 BW2:11 BW3:12"
    )
    assert found.seconds_per_minibatch * 4 == pytest.approx(4 * 3 + 1)


def test_halves_that_are_not_equal():
    """The second stage: 1.5 s for the gradients of the inputs, 0.5 s for those of the weights."""
    works = chain((1, 2), StageWork(1, 2, input_share=0.75))
    found = run_orders(zero_bubble(2, 8, 4), works)
    first, second = (
        [f"{a.kind}{a.minibatch}:{begin:g}" for a, begin, _ in events if a.kind in PASSES]
        for _, events in sorted(found.events.items())
    )
    assert " ".join(first[:8]) == "F0:0 F1:1 B0:3.5 F2:5.5 B1:6.5 F3:8.5 B2:9.5 B3:12"
    assert " ".join(second[:12]) == (
        "F0:1 BI0:2 F1:3.5 BI1:4.5 BW0:6 F2:6.5 BI2:7.5 BW1:9 F3:9.5 BI3:10.5 BW2:12 BW3:12.5"
    )
    assert found.seconds_per_minibatch * 4 == pytest.approx(4 * 3 + 1 + 1.5 - 0.5)


def test_the_halves_of_a_stage_are_those_of_its_nodes():
    """Calls and recomputation are in the first half; the stage that sends no gradients has no more
    in it than that.
    """
    nodes = [
        Node("z", "Linear", 1.0, 4.0, (8.0,), 8.0, backward_input_share=0.25, kept_bytes=6),
        Node("a", "Linear", 1.0, 4.0, parameter_bytes=8.0, backward_input_share=0.25, kept_bytes=6),
        Node("b", "Add", 2.0, 3.0, (8.0,), kept_bytes=0),
        Node("c", "Linear", 1.0, 6.0, parameter_bytes=8.0),
    ]
    graph = Graph({node.id: node for node in nodes}, (("z", "a"), ("a", "b"), ("b", "c")))
    plan = make_plan(graph, ["z", "ab", "c"], (1, 1, 1), recompute=[1])
    overheads = TrainingOverheads({}, 0.5, 0.25)
    work = Workload.of(plan, policy("flush", (1, 1, 1)), graph, 1e9, overheads)
    none, first, second = work.stages
    assert (none.backward_input_seconds, none.backward_weight_seconds) == (0, 4.25)
    assert first.backward_input_seconds == pytest.approx(0.25 + (0.5 + 3) + 0.25 * 4 + 3)
    assert first.backward_weight_seconds == pytest.approx(0.75 * 4)
    assert first.backward_seconds == pytest.approx(0.25 + (0.5 + 3) + 7)
    assert (second.backward_input_seconds, second.backward_weight_seconds) == (3.25, 3)
    fast = first.at(2.0)
    assert fast.backward_input_seconds == first.backward_input_seconds / 2
    assert fast.backward_weight_seconds == first.backward_weight_seconds / 2


def test_gradients_are_added_to_those_of_a_round():
    """By all passes of a round on a worker but the first, in the second half of a backward pass.
    Rounds of four microbatches were expected 3 % too short.
    """
    node = Node("a", "Linear", 1.0, 4.0, (8.0,), 8.0, backward_input_share=0.25)
    graph = Graph({"a": node, "b": replace(node, id="b")}, (("a", "b"),))
    plan = make_plan(graph, ["a", "b"], (1, 2))
    overheads = TrainingOverheads({}, gradient_sum_rate=4.0)
    rules = policy("flush", (1, 2), 8)
    first, second = Workload.of(plan, rules, graph, 1e9, overheads).stages
    assert first.backward_seconds == pytest.approx(4 + 8 / 4 * 7 / 8)
    assert second.backward_seconds == pytest.approx(4 + 8 / 4 * 3 / 4)
    assert second.backward_input_seconds == pytest.approx(1)
    plain = Workload.of(plan, policy("weight-stashing", (1, 2)), graph, 1e9, overheads)
    assert [work.backward_seconds for work in plain.stages] == [4, 4]


def test_what_is_held_between_the_halves():
    """Ten bytes per minibatch in flight, four once the first half is done; without measurement ten
    to the end.
    """
    none = dict.fromkeys(StageMemory.model_fields, 0.0)
    memory = StageMemory(**none | {"activations": 14.0, "inputs": 6.0})
    peak = Peak(2, 1)
    assert HeldBytes.of(memory, peak).halfway is None
    held = HeldBytes.of(memory, peak, kept=1.0)
    assert (held.minibatch, held.halfway) == (10, 4)
    for kept, most in ((held, 14), (HeldBytes.of(memory, peak), 20)):
        work = StageWork(1, 2, memory=kept)
        found = run_orders(zero_bubble(2, 8, 4), chain((1, 2), work))
        # From 3 s on there is F1 beside what is left of 0; from 5 s BW0 beside what is left of 1.
        assert dict(found.memory[1])[3] == most
        assert dict(found.memory[1])[5] == {14: 8, 20: 20}[most]
        assert found.memory[1][-1][1] == 0
