import pytest
from amount import examples
from cost_models import FORMULAS
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import graphs

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.models import COST_MODELS
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.cuts.frontier import bins_of
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.bounds import bound_over_bins, throughput_bound
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request


def test_devices_share_the_time_at_best(make_graph):
    graph = make_graph("a b", "a-b", a=(30, 0, 0), b=(50, 0, 0))
    cluster = Cluster(machines=(4,), bandwidth=(1e9,))
    bound = throughput_bound(
        PlanningGraph.of(graph), cluster, COST_MODELS["paper"](), straight=False
    )
    assert bound == pytest.approx(0.020)


def test_a_node_that_cannot_be_replicated_well_bounds_the_time(make_graph):
    # b alone: 50 ms on one, on two 25 ms of compute but 2*1e9/1e9/2 s of all-reduce.
    graph = make_graph("a b", "a-b", a=(1, 0, 0), b=(50, 0, 1e9))
    cluster = Cluster(machines=(4,), bandwidth=(1e9,))
    for straight in (False, True):
        bound = throughput_bound(PlanningGraph.of(graph), cluster, COST_MODELS["paper"](), straight)
        assert bound == pytest.approx(0.050)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_no_plan_is_faster(make_graph, data):
    number = st.integers(0, 9)
    names = "a b c d e"
    costs = {
        n: (data.draw(number) + 1, data.draw(number) * 1e5, data.draw(number) * 1e6)
        for n in names.split()
    }
    graph = make_graph(names, "a-b a-c b-d c-d a-e", **costs)
    machines = data.draw(st.sampled_from([(3,), (2, 2), (3, 2), (2, 2, 2)]))
    levels = len(machines)
    cluster = Cluster(
        machines=machines,
        bandwidth=(1e9, 3e8, 1e8)[:levels],
        latency=(1e-4, 2e-3, 5e-3)[:levels],
    )
    model = COST_MODELS[data.draw(st.sampled_from(FORMULAS))](1.0)
    rules = Rules(fewer_machines=data.draw(st.booleans()))
    best = optimize(Request(graph, cluster, model, rules=rules)).plan.predicted
    bound = throughput_bound(PlanningGraph.of(graph), cluster, model, straight=False)
    assert bound <= best.seconds_per_minibatch * (1 + 1e-12)


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from([(2,), (3,), (4,), (2, 2), (3, 2), (2, 2, 2)]),
    model=st.sampled_from(FORMULAS),
    compression=st.sampled_from([None, 1.0]),
    rules=st.builds(Rules, st.just(False), st.booleans()),
    work=st.sampled_from([1, 1e4, 1e7]),
    most=st.sampled_from([3, 6, 40]),
)
def test_no_plan_is_faster_than_one_over_bins(
    graph, machines, model, compression, rules, work, most
):
    levels = len(machines)
    cluster = Cluster(
        machines=machines,
        bandwidth=(1e9, 3e8, 1e8)[:levels],
        latency=(1e-4, 2e-3, 5e-3)[:levels],
    )
    model = COST_MODELS[model](compression)
    best = optimize(Request(graph, cluster, model, rules=rules)).plan.predicted
    optimum = best.seconds_per_minibatch
    bins = bins_of(PlanningGraph.of(graph), work).merged(most)
    for within in (optimum, 2 * optimum):
        bound = bound_over_bins(bins, cluster, model, False, within)
        assert bound <= optimum * (1 + 1e-9)
    assert bound_over_bins(bins, cluster, model, False, optimum / 2) <= optimum / 2


def test_bins_see_what_a_cut_costs(make_graph):
    # 30 ms on each of two devices, but that sends 100 MB and takes 200 ms; together 60 ms.
    costs = {"a": (30, 1e8, 1e9), "b": (30, 0, 1e9)}
    graph = PlanningGraph.of(make_graph("a b", "a-b", **costs))
    cluster = Cluster(machines=(2,), bandwidth=(1e9,))
    model = COST_MODELS["paper"]()
    assert throughput_bound(graph, cluster, model, False) == pytest.approx(0.030)
    assert bound_over_bins(bins_of(graph), cluster, model, False, 1.0) == pytest.approx(0.060)
