"""What a plan takes, worked out again from plan.json: the same that the planner said."""

import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import graphs

from pipedream.graph.cluster import Cluster, DeviceType
from pipedream.graph.errors import UserError
from pipedream.graph.profile import TrainingOverheads
from pipedream.optimizer.calibrate.price_plan import Price, price_plan, stage_times
from pipedream.optimizer.choose.chooser import best_plan
from pipedream.optimizer.cost.models import MeasuredCost, NetworkCost, PaperCost, ReleasedCost
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.outcome import fixed_outcome
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request

KINDS = (DeviceType(name="new"), DeviceType(name="old", speed=0.5))


@st.composite
def clusters(draw):
    machines = draw(st.sampled_from([(3,), (2, 2), (3, 2), (2, 1, 2)]))
    names = st.sampled_from(["new", "old"])
    kinds = draw(st.none() | st.lists(names, min_size=machines[-1], max_size=machines[-1]))
    return Cluster(
        machines=machines,
        bandwidth=(1e10, 1e9, 1e8)[: len(machines)],
        latency=(1e-6, 1e-5, 1e-4)[: len(machines)],
        kinds=KINDS if kinds else (),
        machine_kinds=tuple(kinds or ()),
    )


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(
    graphs(7),
    clusters(),
    st.sampled_from([PaperCost(), ReleasedCost(), ReleasedCost(2.0), MeasuredCost()]),
    st.sampled_from([None, Latency(2), Latency(9)]),
    st.booleans(),
    st.sampled_from([None, TrainingOverheads({}, 2e-3, 1e-3, 3e-3, [0.9, 1.0, 1.4])]),
)
def test_a_plan_takes_what_the_planner_said(graph, cluster, model, latency, fewer, overheads):
    schedule = "weight-stashing" if latency is None else "flush"
    rules = Rules(fewer_machines=fewer)
    request = Request(
        graph,
        cluster,
        model,
        schedule=schedule,
        latency=latency,
        rules=rules,
        overheads=overheads,
        update_rate=1e6,
    )
    plan = optimize(request).plan
    found, said = price_plan(plan, request), Price.recorded_in(plan)
    assert found.per_minibatch == pytest.approx(said.per_minibatch)
    if overheads is None or not isinstance(model, MeasuredCost):
        assert found.expected is said.expected is None
    else:
        assert found.expected == pytest.approx(said.expected)
        assert found.expected > found.per_minibatch
    if latency is not None:
        assert found.latency == pytest.approx(said.latency)
    assert found.goal == pytest.approx(said.goal)


def test_a_forward_pass_that_is_done_again_counts(make_graph):
    graph = make_graph("a b", "a-b", a=(4, 1e3, 1e3), b=(4, 1e3, 1e3))
    cluster, rules = Cluster(machines=(2,), bandwidth=(1e9,)), Rules(straight=True)
    plan = optimize(Request(graph, cluster, PaperCost(), rules=rules, recompute="always")).plan
    assert [stage.recompute for stage in plan.stages] == [True, False]
    assert price_plan(plan, Request(graph, cluster, PaperCost())).per_minibatch == pytest.approx(
        8e-3
    )


@pytest.mark.parametrize("machines", [(4,), (2, 2)])
@pytest.mark.parametrize("latency", [None, Latency(3)])
def test_messages_count_at_the_level_where_stages_meet(make_graph, machines, latency):
    graph = make_graph("a b c d", "a-b b-c c-d", **dict.fromkeys("abcd", (1, 1e4, 1e3)))
    cluster = Cluster(machines=machines, bandwidth=(1e6, 1e5)[: len(machines)])
    rules, schedule = Rules(straight=True), "weight-stashing" if latency is None else "flush"
    request = Request(graph, cluster, PaperCost(), schedule=schedule, latency=latency, rules=rules)
    plan = optimize(request).plan
    found = price_plan(plan, request)
    assert found.per_minibatch == pytest.approx(2e4 / min(cluster.bandwidth))
    assert found.goal == pytest.approx(Price.recorded_in(plan).goal)


def test_ranks_that_no_cost_model_knows_are_refused(make_graph):
    graph = make_graph("a b", "a-b")
    cluster = Cluster(machines=(2, 2), bandwidth=(1e9, 1e9))
    plan = optimize(Request(graph, cluster, PaperCost())).plan
    stage = plan.stages[0].model_copy(update={"ranks": (0, 1, 2)})
    odd = plan.model_copy(update={"stages": (stage,)})
    with pytest.raises(UserError, match="the ranks of stage 0 are not whole pieces"):
        price_plan(odd, Request(graph, cluster, PaperCost()))


def test_a_plan_chosen_by_simulation_is_compared_by_it(make_graph):
    """--calibrate asks whether another plan is faster: faster in a run, not in closed form."""
    graph = make_graph("a b c", "a-b b-c", a=(30, 1e5, 1e3), b=(6, 2e5, 1e8), c=(4, 10, 0))
    request = Request(graph, Cluster(machines=(3,), bandwidth=(1e9,)), NetworkCost())
    plan = best_plan(request).plan
    said, again = Price.recorded_in(plan), price_plan(plan, request)
    assert said.goal == plan.predicted.simulated.seconds_per_minibatch
    assert again.goal == pytest.approx(said.goal)
    assert again.expected == pytest.approx(said.expected)


def test_the_first_stage_reads_the_inputs_and_the_last_one_the_target(make_graph):
    graph = make_graph("a b c", "a-b b-c", a=(4, 1e3, 0), b=(4, 1e3, 0), c=(4, 1e3, 0))
    cluster, rules = Cluster(machines=(3,), bandwidth=(1e15,)), Rules(straight=True)
    request = Request(
        graph, cluster, MeasuredCost(), rules=rules, overheads=TrainingOverheads({}, reading=2e-3)
    )
    plan = fixed_outcome(request, [1, 2, 3], [1, 1, 1]).plan
    times = [seconds for seconds, _ in stage_times(plan, request)]
    assert times == pytest.approx([6e-3, 4e-3, 6e-3])
    simulated = price_plan(plan, request).simulated
    assert simulated == pytest.approx(6e-3)
    alone = fixed_outcome(request, [3], [1]).plan
    assert alone.predicted.seconds_per_minibatch == pytest.approx(14e-3)
    assert plan.predicted.one_worker_seconds == pytest.approx(14e-3)
