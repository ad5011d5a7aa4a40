"""The latency search against every flat pipeline there is, tried one by one."""

import math
from dataclasses import replace

import pytest
from amount import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_graphs import graphs

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.models import COST_MODELS
from pipedream.optimizer.cost.stage_cost import Replication
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.cuts.antichains import all_downsets
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.frontier import bins_of
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.bounds import latency_bound_over_bins
from pipedream.optimizer.search.fill_order import build_fill_order
from pipedream.optimizer.search.latency import DoneBounds, Latency, LatencySearch
from pipedream.optimizer.search.nothing_fits import NothingFits
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request

MODELS = [
    ("paper", None),
    ("paper", 4.0),
    ("released", None),
    ("released", 1.0),
    ("measured", None),
]
BANDWIDTH = (1e9, 2e8, 1e8)


def batch(times, microbatches):
    return sum(times) + (microbatches - 1) * max(times)


def as_pipeline(plan):
    """The stages of a plan as by_hand's flat pipelines have them."""
    stages, before = [], frozenset()
    for stage in plan.stages:
        devices = sorted(stage.ranks)
        assert devices == list(range(devices[0], devices[-1] + 1))
        after = before | frozenset(stage.nodes)
        stages.append((before, after, range(devices[0], devices[-1] + 1)))
        before = after
    return stages


def check(
    by_hand,
    graph,
    machines,
    model,
    rules,
    goal,
    most_cuts,
    share=None,
    schedule="flush",
    recompute="auto",
    tried=None,
    zero="never",
):
    """Plans, tries every pipeline, compares; with `share` of the memory the free plan needs."""
    name, compression = model
    cuts = by_hand.downsets(graph)
    assume(len(cuts) <= most_cuts)
    assume(not rules.straight or rules.fewer_machines or math.prod(machines) <= len(graph.nodes))
    costs = by_hand.Costs(graph, machines, BANDWIDTH[: len(machines)], name, compression)
    cluster = Cluster(machines=machines, bandwidth=BANDWIDTH[: len(machines)])
    cost = COST_MODELS[name](compression)
    states, optimizer = (0, "sgd") if zero == "never" else (2, "adam")
    request = Request(
        *(graph, cluster, cost, schedule, None, rules, goal, optimizer, recompute, zero),
        in_flight="least",
    )
    memory = None
    if share is not None:
        free = optimize(request)
        memory = share * max(stage.memory_bytes for stage in free.plan.stages)
        assume(memory > 0)
    pipelines = by_hand.flat_pipelines(cuts, machines, rules.straight, rules.fewer_machines)
    settings = (schedule, math.inf if memory is None else memory, recompute, states, zero)
    held = ((pipeline, by_hand.flat_within(costs, pipeline, *settings)) for pipeline in pipelines)
    best = min(
        (
            batch(by_hand.flat_times(costs, pipeline, found[1]), goal.microbatches)
            for pipeline, found in held
            if found
        ),
        default=math.inf,
    )
    request = replace(request, memory=memory)
    if best == math.inf:
        with pytest.raises(NothingFits):
            optimize(request)
        return
    outcome = optimize(request, tried)
    predicted = outcome.plan.predicted
    pipeline = as_pipeline(outcome.plan)
    most, alone = by_hand.flat_within(costs, pipeline, *settings)
    times = by_hand.flat_times(costs, pipeline, alone)
    assert [figures.seconds for figures in outcome.figures] == pytest.approx(times)
    assert predicted.latency_seconds == pytest.approx(batch(times, goal.microbatches), rel=1e-9)
    assert predicted.seconds_per_minibatch == pytest.approx(max(times), rel=1e-9)
    if goal.epsilon == 0 and goal.layers is None and (tried is None or tried >= len(cuts)):
        assert outcome.exact
        assert predicted.latency_seconds == pytest.approx(best, rel=1e-9)
        assert predicted.latency_lower_bound_seconds == pytest.approx(best, rel=1e-9)
    else:
        assert best <= predicted.latency_seconds * (1 + 1e-9)
        assert predicted.latency_lower_bound_seconds <= best * (1 + 1e-9)
    if goal.layers is None and tried is None:
        lost = predicted.latency_seconds - best
        assert lost <= goal.microbatches * goal.epsilon + 1e-9 * best
    assert max(stage.memory_bytes for stage in outcome.plan.stages) == pytest.approx(most)
    assert memory is None or most <= memory
    assert rules.fewer_machines or outcome.plan.workers == cluster.devices


FLAT = [(1,), (2,), (3,), (4,)]
LEVELS = [(2, 2), (3, 2), (2, 3), (1, 2), (2, 1)]
BATCHES = [1, 2, 5, 64]
RULES = st.builds(Rules, st.booleans(), st.booleans())


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from(FLAT),
    model=st.sampled_from(MODELS),
    rules=RULES,
    goal=st.builds(Latency, st.sampled_from(BATCHES)),
)
def test_one_level_equals_brute_force(by_hand, graph, machines, model, rules, goal):
    check(by_hand, graph, machines, model, rules, goal, most_cuts=24)


@pytest.mark.thorough
@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from(LEVELS),
    model=st.sampled_from(MODELS),
    rules=RULES,
    goal=st.builds(Latency, st.sampled_from(BATCHES)),
)
def test_two_levels_equal_brute_force(by_hand, graph, machines, model, rules, goal):
    check(by_hand, graph, machines, model, rules, goal, most_cuts=12)


@settings(max_examples=examples(25), deadline=None)
@given(graph=graphs(most=6), goal=st.builds(Latency, st.sampled_from(BATCHES)))
def test_three_levels_equal_brute_force(by_hand, graph, goal):
    check(by_hand, graph, (2, 2, 2), ("paper", None), Rules(), goal, most_cuts=8)


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from([*FLAT, *LEVELS]),
    model=st.sampled_from(MODELS),
    rules=RULES,
    goal=st.builds(Latency, st.sampled_from(BATCHES)),
    share=st.sampled_from([0.3, 0.5, 0.7, 0.9]),
    schedule=st.sampled_from(["weight-stashing", "flush"]),
    recompute=st.sampled_from(["never", "auto", "always"]),
    zero=st.sampled_from(["never", "auto", "always"]),
)
def test_plans_within_memory_equal_brute_force(
    by_hand, graph, machines, model, rules, goal, share, schedule, recompute, zero
):
    settings = 11, share, schedule, recompute
    check(by_hand, graph, machines, model, rules, goal, *settings, zero=zero)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from([*FLAT, *LEVELS]),
    goal=st.builds(Latency, st.sampled_from(BATCHES), st.sampled_from([1e-4, 1e-3, 1e-2])),
)
def test_epsilon_loses_at_most_itself_for_each_microbatch(by_hand, graph, machines, goal):
    check(by_hand, graph, machines, ("paper", None), Rules(), goal, most_cuts=14)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from([*FLAT, *LEVELS]),
    model=st.sampled_from(MODELS),
    rules=RULES,
    goal=st.builds(Latency, st.sampled_from(BATCHES), st.just(0.0), st.integers(1, 6)),
)
def test_layers_give_a_plan_and_a_bound_that_holds(by_hand, graph, machines, model, rules, goal):
    assume(not rules.straight or rules.fewer_machines or math.prod(machines) <= goal.layers)
    check(by_hand, graph, machines, model, rules, goal, most_cuts=12)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from([*FLAT, *LEVELS]),
    model=st.sampled_from(MODELS),
    goal=st.builds(Latency, st.sampled_from(BATCHES)),
    tried=st.integers(2, 8),
)
def test_some_cuts_give_a_plan_and_a_bound_that_holds(by_hand, graph, machines, model, goal, tried):
    check(by_hand, graph, machines, model, Rules(), goal, most_cuts=12, tried=tried)


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from([*FLAT, *LEVELS]),
    model=st.sampled_from(MODELS),
    rules=RULES,
    goal=st.builds(Latency, st.sampled_from(BATCHES)),
    most=st.integers(3, 20),
)
def test_no_pipeline_is_sooner_than_the_bound_over_bins(
    by_hand, graph, machines, model, rules, goal, most
):
    name, compression = model
    cuts = by_hand.downsets(graph)
    assume(len(cuts) <= 12)
    assume(not rules.straight or rules.fewer_machines or math.prod(machines) <= len(graph.nodes))
    costs = by_hand.Costs(graph, machines, BANDWIDTH[: len(machines)], name, compression)
    cluster = Cluster(machines=machines, bandwidth=BANDWIDTH[: len(machines)])
    best = min(
        batch(by_hand.flat_times(costs, pipeline, alone), goal.microbatches)
        for pipeline in by_hand.flat_pipelines(cuts, machines, rules.straight, rules.fewer_machines)
        for _, alone in [by_hand.flat_within(costs, pipeline, "flush", math.inf)]
    )
    bins = bins_of(PlanningGraph.of(graph)).merged(most)
    cost = COST_MODELS[name](compression)
    bound = latency_bound_over_bins(bins, cluster, cost, rules, goal, 2 * best)
    assert bound <= best * (1 + 1e-9)


@settings(max_examples=examples(150), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from([*FLAT, *LEVELS]),
    model=st.sampled_from(MODELS),
    rules=RULES,
    goal=st.builds(Latency, st.sampled_from(BATCHES)),
)
def test_what_is_known_of_the_best_leaves_the_best_to_be_found(graph, machines, model, rules, goal):
    assume(not rules.straight or rules.fewer_machines or math.prod(machines) <= len(graph.nodes))
    planning = PlanningGraph.of(graph)
    downsets = all_downsets(planning, 40)
    assume(downsets is not None)
    cluster = Cluster(machines=machines, bandwidth=BANDWIDTH[: len(machines)])
    name, compression = model
    cuts = Cuts(planning, downsets)
    cost = Replication(cuts, cluster, COST_MODELS[name](compression))
    ways = build_fill_order(machines, DeviceTypes.of(cluster), rules, with_downstream=False)

    def search(within):
        return LatencySearch(cuts, DoneBounds.of(cuts), ways, cost, goal, within).best()

    best = search(math.inf).cost
    assert search(best).cost == pytest.approx(best, rel=1e-12)
    assert search(1.3 * best).cost == pytest.approx(best, rel=1e-12)
    within = search(0.9 * best)
    assert within is None or within.cost >= best * (1 - 1e-12)
