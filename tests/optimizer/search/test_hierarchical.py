"""The dynamic program against every plan there is, tried one by one."""

import math
from dataclasses import replace

import pytest
from amount import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_graphs import graphs

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.device_types import DeviceTypes, WorstDevice
from pipedream.optimizer.cost.models import COST_MODELS
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.search.hierarchical import affordable
from pipedream.optimizer.search.nothing_fits import NothingFits
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request

MODELS = [
    ("paper", None),
    ("paper", 4.0),
    ("released", None),
    ("released", 1.0),
    ("released", 4.0),
    ("measured", None),
    ("measured", 4.0),
]


def best_of_all(by_hand, costs, cuts, rules, *settings):
    """The least time over every plan, infinite if none fits."""
    level = len(costs.machines) - 1
    plans = by_hand.every_plan(cuts, costs.machines, rules.straight, rules.fewer_machines)
    held = ((plan, costs.within(plan, *settings)) for plan in plans)
    return min(
        (costs.time(level, plan, found[1]) for plan, found in held if found), default=math.inf
    )


def check(
    by_hand,
    graph,
    machines,
    model,
    rules,
    most_cuts,
    share=None,
    schedule="flush",
    recompute="auto",
    optimizer="sgd",
    zero="never",
):
    """Plans, tries every plan, compares; with `share` of the memory that the free plan needs."""
    name, compression = model
    cuts = by_hand.downsets(graph)
    assume(len(cuts) <= most_cuts)
    assume(not rules.straight or rules.fewer_machines or math.prod(machines) <= len(graph.nodes))
    bandwidth = (1e9, 2e8, 1e8)[: len(machines)]
    latency = (1e-4, 2e-3, 5e-3)[: len(machines)]
    costs = by_hand.Costs(graph, machines, bandwidth, name, compression, latency)
    cluster = Cluster(machines=machines, bandwidth=bandwidth, latency=latency)
    request = Request(
        graph,
        cluster,
        COST_MODELS[name](compression),
        schedule,
        rules=rules,
        recompute=recompute,
        optimizer=optimizer,
        zero=zero,
        in_flight="least",
    )
    outcome = optimize(request)
    memory = None
    if share is not None:
        memory = share * max(stage.memory_bytes for stage in outcome.plan.stages)
        assume(memory > 0)
        request = replace(request, memory=memory)
    room = math.inf if memory is None else memory
    states = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]
    settings = (schedule, room, recompute, states, zero)
    best = best_of_all(by_hand, costs, cuts, rules, *settings)
    if best == math.inf:
        with pytest.raises(NothingFits):
            optimize(request)
        return
    outcome = optimize(request)
    predicted = outcome.plan.predicted
    if outcome.plan.workers < cluster.devices and not rules.fewer_machines:
        # Rather a machine without work than a stage without, as the best on all machines has.
        freely = best_of_all(by_hand, costs, cuts, replace(rules, fewer_machines=True), *settings)
        assert freely * (1 - 1e-9) <= predicted.seconds_per_minibatch <= best * (1 + 1e-9)
        assert all(stage.compute_seconds for stage in outcome.plan.stages)
        best = predicted.seconds_per_minibatch
    assert outcome.exact
    assert outcome.considered == len(cuts)
    assert predicted.seconds_per_minibatch == pytest.approx(best, rel=1e-9)
    assert predicted.lower_bound_seconds == pytest.approx(best, rel=1e-9)
    nested = by_hand.nest(outcome.plan, graph)
    most, seconds = costs.within(nested, *settings)
    assert costs.time(len(machines) - 1, nested, seconds) == pytest.approx(best, rel=1e-9)
    held = max(stage.memory_bytes for stage in outcome.plan.stages)
    assert held == pytest.approx(most)
    assert memory is None or held <= memory
    assert [stage.compute_seconds for stage in outcome.plan.stages] == pytest.approx(
        list(seconds.values())
    )
    for stage in outcome.plan.stages:
        assert stage.memory.total == pytest.approx(stage.memory_bytes)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from([(1,), (2,), (3,), (4,)]),
    model=st.sampled_from(MODELS),
    rules=st.builds(Rules, st.booleans(), st.booleans()),
)
def test_flat_plans_equal_brute_force(by_hand, graph, machines, model, rules):
    check(by_hand, graph, machines, model, rules, most_cuts=40)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from([(2, 2), (3, 2), (2, 3), (1, 2), (2, 1)]),
    model=st.sampled_from(MODELS),
    rules=st.builds(Rules, st.booleans(), st.booleans()),
)
def test_two_levels_equal_brute_force(by_hand, graph, machines, model, rules):
    check(by_hand, graph, machines, model, rules, most_cuts=14)


@settings(max_examples=examples(25), deadline=None)
@given(graph=graphs(most=6), model=st.sampled_from(MODELS), rules=st.builds(Rules))
def test_three_levels_equal_brute_force(by_hand, graph, model, rules):
    check(by_hand, graph, (2, 2, 2), model, rules, most_cuts=8)


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from([(2,), (3,), (4,), (2, 2), (3, 2), (2, 3)]),
    model=st.sampled_from(MODELS),
    rules=st.builds(Rules, st.booleans(), st.booleans()),
    share=st.sampled_from([0.3, 0.5, 0.7, 0.9]),
    schedule=st.sampled_from(["weight-stashing", "flush"]),
    recompute=st.sampled_from(["never", "auto", "always"]),
    optimizer=st.sampled_from(["sgd", "momentum", "adam"]),
    zero=st.sampled_from(["never", "auto", "always"]),
)
def test_plans_within_memory_equal_brute_force(
    by_hand, graph, machines, model, rules, share, schedule, recompute, optimizer, zero
):
    settings = share, schedule, recompute, optimizer, zero
    check(by_hand, graph, machines, model, rules, 10, *settings)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(
    graph=graphs(most=6),
    machines=st.sampled_from([(2, 2), (3, 2), (1, 3), (2, 3)]),
    model=st.sampled_from(MODELS),
    share=st.sampled_from([0.3, 0.5, 0.7]),
)
def test_devices_left_unused_are_counted_exactly(by_hand, graph, machines, model, share):
    rules = Rules(fewer_machines=True)
    check(by_hand, graph, machines, model, rules, 8, share, "weight-stashing")


def test_affordable_is_less_with_levels_machines_and_memory():
    assert most_cuts([1]) == 20_000
    assert 5_000 < most_cuts([16]) < most_cuts([8]) < most_cuts([4]) <= 20_000
    assert 1_500 < most_cuts([8, 8]) < most_cuts([4, 8]) == most_cuts([4, 4]) < 3_000
    assert 500 < most_cuts([4, 4], memory=1.0) < most_cuts([4, 4])


def most_cuts(machines, memory=math.inf):
    devices = [WorstDevice(1.0, memory)] * machines[-1]
    return affordable(machines, DeviceTypes.from_devices(devices))
