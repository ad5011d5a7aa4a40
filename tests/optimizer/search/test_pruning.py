from itertools import pairwise

import numpy as np
import pytest
from amount import examples
from cost_models import FORMULAS
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import graphs

from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.models import COST_MODELS, PaperCost, ReleasedCost
from pipedream.optimizer.cost.stage_cost import Replication
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.cuts.antichains import all_downsets
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search import planner
from pipedream.optimizer.search import pruning as elimination
from pipedream.optimizer.search.hierarchical import Search
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.pruning import PruningProblem, prune_cuts
from pipedream.optimizer.search.request import Request

SHAPES = [(2,), (3,), (4,), (2, 2), (3, 2), (2, 2, 2)]


def cluster_of(machines):
    levels = len(machines)
    latency = (1e-4, 2e-3, 5e-3)[:levels]
    return Cluster(machines=machines, bandwidth=(1e9, 3e8, 1e8)[:levels], latency=latency)


def every_cut(graph):
    planning = PlanningGraph.of(graph)
    return Cuts(planning, all_downsets(planning, 10_000))


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from(SHAPES),
    model=st.sampled_from(FORMULAS),
    compression=st.sampled_from([None, 1.0]),
    rules=st.builds(Rules, st.booleans(), st.booleans()),
    groups=st.sampled_from([1, 2, 5, 1_000]),
    slack=st.sampled_from([1e-9, 0.1, 1.0]),
)
def test_no_cut_of_a_plan_of_interest_is_dropped(
    graph, machines, model, compression, rules, groups, slack
):
    cuts, cluster = every_cut(graph), cluster_of(machines)
    model = COST_MODELS[model](compression)
    cost, types = Replication(cuts, cluster, model), DeviceTypes.of(cluster)
    best = Search(cuts, machines, cost, rules, types).best()
    if best is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "_MOST", groups)
        found = prune_cuts(cuts, PruningProblem(cluster, model, rules), best.cost * (1 + slack))
    used = {cut for stage in best.stages for cut in (stage.start, stage.end)}
    assert used <= {0, *found.tolist(), len(cuts) - 1}


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(
    graph=graphs(),
    machines=st.sampled_from(SHAPES),
    model=st.sampled_from(FORMULAS),
    compression=st.sampled_from([None, 1.0]),
    rules=st.builds(Rules, st.booleans(), st.booleans()),
    memory=st.sampled_from([None, None, 3e7, 6e7]),
    few=st.sampled_from([1, 4, 12]),
)
def test_the_plan_is_as_good_as_over_all_cuts(
    graph, machines, model, compression, rules, memory, few
):
    request = Request(
        graph, cluster_of(machines), COST_MODELS[model](compression), memory=memory, rules=rules
    )

    def plan():
        try:
            found = optimize(request, 10_000)
        except UserError:
            return None
        assert found.exact
        return found.plan.predicted.seconds_per_minibatch

    over_all = plan()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_AT_ONCE", 10_000 // few)
        patch.setattr(planner, "_FEW", 1)
        narrowed = plan()
    assert narrowed == (over_all and pytest.approx(over_all, rel=1e-9))


def test_a_cut_that_costs_more_than_the_plan_to_send_is_dropped(make_graph):
    """Of the cuts of a chain a-b-c-d the one in the middle takes 200 ms to send, the others 2."""
    costs = dict.fromkeys("acd", (20, 1e6, 0)) | {"b": (20, 1e8, 0)}
    cuts = every_cut(make_graph("a b c d", "a-b b-c c-d", **costs))
    question = PruningProblem(cluster_of((2,)), PaperCost(), Rules())
    assert prune_cuts(cuts, question, 0.0800001).tolist() == [1, 3]
    # In less than 60 ms: neither 20 and 60, nor 60 and 20, is a plan.
    assert prune_cuts(cuts, question, 0.060).tolist() == []


def test_a_cut_inside_a_stage_may_cost_as_much_as_its_replicas_allow(make_graph):
    """It takes 60 ms to send: 30 ms for each minibatch where two machines do the same."""
    cuts = every_cut(make_graph("a b", "a-b", a=(40, 3e6, 0), b=(40, 3e6, 0)))
    cluster = Cluster(machines=(2, 2), bandwidth=(1e8, 1e8))
    question = PruningProblem(cluster, PaperCost(), Rules())
    assert prune_cuts(cuts, question, 0.0301).tolist() == [1]
    assert prune_cuts(cuts, question, 0.0299).tolist() == []


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("machines", "model", "milliseconds"),
    [
        ((4,), PaperCost(), 172.2595),
        ((4,), ReleasedCost(1.0), 198.8510),
        ((8,), ReleasedCost(1.0), 101.8831),
        ((16,), ReleasedCost(1.0), 61.6317),
        ((4, 4), ReleasedCost(1.0), 63.5487),
    ],
)
def test_two_hundred_thousand_cuts_are_planned_exactly(
    by_hand, profile, machines, model, milliseconds
):
    graph = profile("inception_v3")
    cluster = Cluster(machines=machines, bandwidth=(1e9,) if len(machines) == 1 else (1e10, 1e9))
    found = optimize(Request(graph, cluster, model))
    assert found.exact
    assert found.considered == 221_565
    seconds = found.plan.predicted.seconds_per_minibatch
    assert seconds == pytest.approx(milliseconds * 1e-3, rel=1e-6)
    costs = by_hand.Costs(
        by_hand.working(graph), machines, cluster.bandwidth, model.name, model.compression
    )
    nested = by_hand.nest(found.plan, by_hand.working(graph))
    assert np.isclose(costs.time(len(machines) - 1, nested), seconds, rtol=1e-9)


def test_buckets_of_replicas_do_not_rule_out_stages_without() -> None:
    """Replicas add gradients up in buckets, as many bytes as the parameters: with two of them no
    stage fits here. Below the cost of a first plan the best one was not found, and the first said
    to be the best.
    """
    seconds = (0.0, 0.0, 0.001, 0.0, 0.0, 0.001, 0.002, 0.0)
    megabytes = (3, 8, 3, 6, 0, 1, 5, 9)
    names = [f"n{number}" for number in range(8)]
    nodes = {
        name: Node(
            name,
            "Layer",
            backward_seconds=each,
            activation_bytes=(0.0, 1e5 if name == "n0" else 0.0),
            parameter_bytes=size * 1e6,
        )
        for name, each, size in zip(names, seconds, megabytes, strict=True)
    }
    graph = Graph(nodes, tuple(pairwise(names)))
    request = Request(graph, cluster_of((2,)), COST_MODELS["measured"](None), memory=6e7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_AT_ONCE", 2_500)
        patch.setattr(planner, "_FEW", 1)
        found = optimize(request, 10_000).plan
    assert found.predicted.seconds_per_minibatch == pytest.approx(0.003)
    assert [stage.nodes[0] for stage in found.stages] == ["n0", "n3"]
