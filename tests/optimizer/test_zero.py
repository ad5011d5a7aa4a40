"""Plans in which replicas divide the optimizer's state: what they hold, and what they take."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from amount import examples
from divisions import every_division
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import make_plan
from random_graphs import graphs
from schedules import policy, schedule

from pipedream.graph.choices import SCHEDULES
from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node
from pipedream.graph.profile import TrainingOverheads
from pipedream.optimizer.choose.bound import lower_bound
from pipedream.optimizer.choose.chooser import best_plan
from pipedream.optimizer.choose.ordered import best_ordered_plan
from pipedream.optimizer.choose.placed_trials import PlacedTrials
from pipedream.optimizer.cost.models import NetworkCost, PaperCost
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.closed_form import ClosedForm
from pipedream.optimizer.simulate.simulator import simulate
from pipedream.optimizer.simulate.workload import StageWork, Workload
from pipedream.schedule.steady_state import SteadySpan


@pytest.mark.parametrize(("name", "micro"), [("weight-stashing", 1), ("flush", 4), ("2bw", 4)])
def test_half_of_the_exchange_and_a_part_of_the_update_come_after_the_sum(name, micro):
    """Passes of 3 s, 4 bytes at 1 per second, an update of 2 s: in a round of two minibatches 3, 4
    and 2; or 3, 2 of the reduce-scatter, 1, and 2 of the all-gather.
    """
    node = Node("a", "Linear", 1.0, 2.0, parameter_bytes=4.0)
    plan = make_plan(Graph({"a": node}, ()), ["a"], (2,))
    divided = plan.model_copy(
        update={"stages": (plan.stages[0].model_copy(update={"zero": True}),)}
    )
    followed = policy(name, (2,), micro)
    whole, parts = (
        Workload.of(each, followed, Graph({"a": node}, ()), 2.0) for each in (plan, divided)
    )
    assert whole.stages[0].sums == ((4.0, 1.0),)
    assert parts.stages[0].sums == ((2.0, 1.0),)
    assert (whole.stages[0].update_seconds, parts.stages[0].update_seconds) == (2, 1)
    cluster = Cluster(machines=(2,), bandwidth=(1.0,))
    span = SteadySpan.for_simulation(followed)
    made = schedule(name, (2,), (), span.minibatches, micro)
    passes = 3 * followed.round_size(0) / 2
    for workload, expected in ((whole, passes + 4 + 2), (parts, passes + 2 + 1 + 2)):
        found = simulate(made, workload, cluster, [[0, 1]], span)
        assert found.seconds_per_minibatch == pytest.approx(expected / followed.round_size(0))
        form = ClosedForm(workload, cluster, [[0, 1]], followed)
        assert form.seconds == pytest.approx(found.seconds_per_minibatch)


def test_a_faster_device_gathers_no_faster():
    work = StageWork(2, 2, update_seconds=2, gathered_bytes=6).at(2.0)
    assert (work.update_seconds, work.gathered_bytes) == (1, 6)


def wide(make_graph, **changes):
    """A request for two devices, where a whole copy of the weights with Adam's state and buckets
    takes 6.6 kB, with half of the state 5.4, and a stage of half of the weights 2.5.
    """
    graph = make_graph("a b", "a-b", a=(30, 10, 600), b=(30, 10, 600))
    cluster = Cluster(machines=(2,), bandwidth=(1e9,))
    settings = {"schedule": "flush", "optimizer": "adam", "microbatches": 4, "zero": "auto"}
    return Request(graph, cluster, NetworkCost(), **(settings | changes))


def test_it_is_done_where_memory_asks_and_nowhere_else(make_graph):
    """Data parallelism is fastest; whole it needs 6 kB of weights, gradients, state and buckets."""
    free = best_plan(wide(make_graph)).plan
    assert (free.replicas, free.stages[0].zero) == ((2,), False)
    needed = free.stages[0].memory_bytes
    assert free.stages[0].memory.optimizer_state == 2400
    short = best_plan(wide(make_graph, memory=needed - 1)).plan
    assert (short.replicas, short.stages[0].zero) == ((2,), True)
    assert short.stages[0].memory.optimizer_state == 1200
    assert short.stages[0].memory_bytes == needed - 1200
    assert best_plan(wide(make_graph, memory=needed)).plan.stages == free.stages
    without = best_plan(wide(make_graph, memory=needed - 1, zero="never")).plan
    assert without.replicas == (1, 1)
    always = best_plan(wide(make_graph, zero="always")).plan
    assert always.stages[0].zero
    assert always.stages[0].memory_bytes == needed - 1200


@pytest.mark.parametrize("goal", ["never", "auto"])
def test_it_is_a_remedy_where_nothing_fits(make_graph, goal):
    graph = make_graph("a", "", a=(30, 10, 1e6))
    request = Request(
        graph,
        Cluster(machines=(2,), bandwidth=(1e9,)),
        PaperCost(),
        "flush",
        memory=5.5e6,
        optimizer="adam",
        zero=goal,
    )
    if goal == "auto":
        (stage,) = optimize(request).plan.stages
        assert stage.zero
        assert stage.memory_bytes <= 5.5e6
        return
    with pytest.raises(UserError, match=r"give at least --memory \d+kB or --zero auto$"):
        optimize(request)
    predicting = replace(
        request,
        corrections=frozenset({"weight_prediction"}),
        schedule="weight-stashing",
        memory=3.9e6,
    )
    with pytest.raises(UserError, match=r"give at least --memory \d+kB$"):
        optimize(predicting)


def test_in_other_orders_too(make_graph):
    names = ["a", "b", "c", "d", "e", "f", "g", "h"]
    nodes = dict.fromkeys(names, (30, 10, 1000.0))
    graph = make_graph(" ".join(names), "a-b b-c c-d d-e e-f f-g g-h", **nodes)
    request = Request(
        graph,
        Cluster(machines=(4,), bandwidth=(1e9,)),
        NetworkCost(),
        "flush",
        optimizer="adam",
        microbatches=8,
        order="interleaved",
        zero="auto",
    )
    free = best_ordered_plan(request)
    assert free.plan.order == "interleaved"
    assert not any(stage.zero for stage in free.plan.stages)
    if max(free.plan.replicas) > 1:
        tight = best_ordered_plan(replace(request, memory=free.rank_bytes * 0.99))
        assert any(s.zero for s in tight.plan.stages) or tight.plan.replicas != free.plan.replicas
    always = best_ordered_plan(replace(request, zero="always")).plan
    for stage in always.stages:
        assert stage.zero == (stage.replicas > 1)
        assert stage.memory.optimizer_state == pytest.approx(
            2 * stage.parameter_bytes / stage.replicas
        )


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(30))
@given(
    graph=graphs(most=4),
    devices=st.integers(2, 4),
    schedule=st.sampled_from(SCHEDULES),
    share=st.sampled_from([0.5, 0.7, 0.9]),
    rate=st.sampled_from([1e4, 1e7]),
)
def test_the_bound_holds_and_no_stage_holds_more_than_it_may(graph, devices, schedule, share, rate):
    """Of all divisions, with updates that take long: those of parts take less."""
    request = Request(
        graph,
        Cluster(machines=(devices,), bandwidth=(1e9,)),
        NetworkCost(),
        schedule,
        rules=Rules(fewer_machines=True),
        optimizer="adam",
        microbatches=8,
        update_rate=rate,
        overheads=TrainingOverheads({}),
        zero="auto",
    )
    divisions = list(every_division(request.planning, devices))
    size = sum(
        5 * node.parameter_bytes + sum(node.activation_bytes) for node in graph.nodes.values()
    )
    assume(size > 0)
    limited = replace(request, memory=share * size)
    trials, bound = PlacedTrials(limited), lower_bound(limited)
    for division in divisions:
        trial = trials.try_out(division)
        if trial is None or not trial.fits:
            continue
        assert bound <= trial.seconds * (1 + 1e-9) < inf
        assert all(stage.memory_bytes <= limited.memory for stage in trial.plan.stages)
        assert all(stage.replicas > 1 for stage in trial.plan.stages if stage.zero)


@pytest.mark.parametrize("latency", [None, Latency(400)])
def test_replicas_on_all_levels_divide_the_state(make_graph, latency):
    """The whole model on 2 x 2 devices needs 4.8 kB with a quarter of the state, with half 5.4."""
    graph = make_graph("a b", "a-b", a=(40, 10, 600), b=(20, 10, 600))
    cluster = Cluster(machines=(2, 2), bandwidth=(1e9, 1e9))
    request = Request(
        *(graph, cluster, PaperCost(), "flush"),
        latency=latency,
        memory=5100,
        optimizer="adam",
        zero="auto",
    )
    (stage,) = optimize(request).plan.stages
    assert (stage.replicas, stage.zero) == (4, True)
    assert stage.memory.optimizer_state == 600
    assert len(optimize(replace(request, zero="never")).plan.stages) == 2
