"""What requests that are made of one another share, and the one place that prices stages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipedream.graph.cluster import Cluster
from pipedream.graph.plan import PlannedGraph
from pipedream.graph.profile import Sharing, TrainingOverheads
from pipedream.optimizer.choose.bound import lower_bound
from pipedream.optimizer.choose.chooser import best_plan
from pipedream.optimizer.cost.models import MeasuredCost, NetworkCost, PaperCost
from pipedream.optimizer.cost.stage_cost import Replication
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request

CLUSTER = Cluster(machines=(3,), bandwidth=(1e9,))


def planned(request: Request) -> PlannedGraph:
    return request.views.planned(request.graph)


def test_graphs_are_worked_out_once_for_all_that_divide_them_alike(make_graph) -> None:
    graph = make_graph("a b c", "a-b b-c", a=(1, 0, 1e6), b=(1, 0, 1e6), c=(1, 0, 1e6))
    overheads = TrainingOverheads({}, reading=2e-3)
    request = Request(graph, CLUSTER, MeasuredCost(), overheads=overheads)
    alike = replace(request, memory=1e9, model=NetworkCost())
    assert alike.planning is request.planning
    assert planned(alike) is planned(request)
    paper = replace(request, model=PaperCost())  # which counts no overheads
    assert paper.planning.reading == 0
    assert request.planning.reading == 2e-3
    assert planned(paper) is planned(request)
    flush = replace(request, schedule="flush")
    assert flush.planning.update < request.planning.update
    tied = replace(request, sharing=(Sharing("w", ("a", "c"), 8.0),))
    assert tied.planning.sharing == tied.sharing
    other = make_graph("a b", "a-b", a=(1, 0, 0), b=(1, 0, 0))
    assert len(replace(request, graph=other).planning) == 2
    assert len(planned(replace(request, graph=other)).nodes) == 2


@pytest.mark.parametrize(
    ("schedule", "update"),
    [("weight-stashing", 1.0), ("2bw", 1.0 / 4), ("flush", 0.5 / 4), ("gpipe", 0.5 / 4)],
)
def test_a_schedule_that_keeps_no_older_version_copies_none(make_graph, schedule, update) -> None:
    """Updates of flush were planned with the copy that weight stashing makes: twice what they take
    for an MLP. Here a step takes a second with it and half a second without.
    """
    graph = make_graph("a", "", a=(8, 0, 1e6))
    request = Request(
        graph,
        Cluster(machines=(1,), bandwidth=(1e9,)),
        MeasuredCost(),
        schedule=schedule,
        update_rate=1e6,
        in_place_rate=2e6,
        overheads=TrainingOverheads({}),
        microbatches=None if schedule == "weight-stashing" else 4,
    )
    compute = sum(node.compute_seconds for node in graph.nodes.values())
    plan = best_plan(request).plan
    simulation = request.simulate(plan)
    assert simulation is not None
    for seconds in (
        plan.predicted.seconds_per_minibatch,
        simulation.seconds_per_minibatch,
        lower_bound(request),
    ):
        assert seconds == pytest.approx(compute + update)


@pytest.mark.parametrize("latency", [None, Latency(4)])
def test_another_answer_to_what_stages_cost_is_put_in_at_one_place(make_graph, latency) -> None:
    """Here stages of several nodes are not allowed, where one would be fastest."""

    class SingleNodes(Replication):
        def on_device(self, start, ends, downstream_workers, replicas=1):
            seconds = super().on_device(start, ends, downstream_workers, replicas)
            counts = [len(self.cuts.nodes(start, end)) for end in np.arange(len(self.cuts))[ends]]
            return np.where(np.array(counts) > 1, np.inf, seconds)

    class Divided(Request):
        def stage_cost(self, cuts, limit=None, working=False):
            return SingleNodes(cuts, self.cluster, self.cost_model, limit, working)

    graph = make_graph("a b c", "a-b b-c", a=(2, 0, 0), b=(1, 0, 0), c=(1, 0, 0))
    plain, divided = (
        optimize(kind(graph, CLUSTER, PaperCost(), latency=latency)).plan
        for kind in (Request, Divided)
    )
    assert len(plain.stages) == 1
    assert [stage.nodes for stage in divided.stages] == [("a",), ("b",), ("c",)]
