"""What plans do with activations that do not fit: recompute nodes, stages, or move them away."""

from dataclasses import replace
from itertools import pairwise

import pytest

from pipedream.graph.cluster import Cluster
from pipedream.graph.model import Graph, Node
from pipedream.graph.profile import Footprint
from pipedream.optimizer.choose.chooser import best_plan
from pipedream.optimizer.cost.models import COST_MODELS
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request

BLOCKS = 12
SAVED = 100e6


def request(model: str, memory: float | None, **more: object) -> Request:
    """Blocks of a product of matrices, 10 ms, and an activation, 1 ms, which save as much."""
    nodes, names = {}, [f"{kind}{b}" for b in range(BLOCKS) for kind in ("matmul", "act")]
    for name in names:
        seconds, parameters = (10e-3, 1e6) if name.startswith("matmul") else (1e-3, 0.0)
        nodes[name] = Node(name, name, seconds, 2 * seconds, (SAVED / 100,), parameters)
    graph = Graph(nodes, tuple(pairwise(names)))
    return Request(
        graph=graph,
        cluster=Cluster(machines=(4,), bandwidth=(1e12,)),
        model=COST_MODELS[model](),
        memory=memory,
        footprints={name: Footprint(SAVED, 1e6) for name in names},
        **more,  # type: ignore[arg-type]
    )


def seconds(asked: Request) -> float:
    plan = best_plan(asked).plan
    assert all(stage.memory_bytes <= (asked.memory or 0) for stage in plan.stages)
    simulated = plan.predicted.simulated
    return (
        plan.predicted.seconds_per_minibatch
        if simulated is None
        else (simulated.seconds_per_minibatch)
    )


def test_selective_is_faster_than_whole_and_slower_than_without_a_limit() -> None:
    memory = 1.75e9
    whole = request("network", memory, recompute="whole")
    plain = seconds(replace(whole, memory=1e12))
    times = [seconds(each) for each in (replace(whole, recompute="auto", selective=True), whole)]
    assert plain < times[0] < times[1]


def test_only_activations_are_recomputed_where_they_are_enough() -> None:
    plan = best_plan(request("network", 1.75e9, selective=True)).plan
    again = [name for stage in plan.stages for name in stage.recomputed_nodes]
    assert again
    assert all(name.startswith("act") for name in again)
    for stage in plan.stages:
        own = sum(2e-3 * 1.5 if n.startswith("act") else 30e-3 for n in stage.nodes)
        assert stage.compute_seconds == pytest.approx(own + 1e-3 * len(stage.recomputed_nodes))


def test_one_device_that_is_too_small_recomputes() -> None:
    """With one in flight, in the last stage: what whole recomputation is no help for."""
    asked = request("network", 1.6e9, selective=True)
    plan = best_plan(replace(asked, cluster=Cluster(machines=(1,), bandwidth=(1e9,)))).plan
    (stage,) = plan.stages
    assert stage.recomputed_nodes
    assert stage.memory_bytes <= 1.6e9


@pytest.mark.thorough
def test_copies_that_are_hidden_are_fastest() -> None:
    asked = request("network", 1.75e9, selective=True)
    fast, slow = (replace(asked, host_bandwidth=rate) for rate in (1e12, 1e6))
    plan = best_plan(fast).plan
    assert any(stage.offload for stage in plan.stages)
    assert seconds(fast) < seconds(asked)
    assert not any(stage.offload for stage in best_plan(slow).plan.stages)


def test_copies_that_take_longer_than_the_passes_are_waited_for() -> None:
    """Of two ways that fit the faster is taken: here both are the copies."""
    asked = request("network", 1.75e9, selective=True, host_bandwidth=3e10)
    plan = best_plan(asked).plan
    work = asked.workload(plan, asked.policy(plan))
    for stage, each in zip(plan.stages, work.stages, strict=True):
        if stage.offload:
            assert stage.offload_seconds == pytest.approx(SAVED * len(stage.nodes) / 3e10)
            passes = each.forward_seconds + each.backward_seconds
            assert passes == pytest.approx(max(stage.offload_seconds, stage.compute_seconds))


@pytest.mark.parametrize("memory", [1.0e9, 1.4e9, 1.75e9, 2.5e9])
@pytest.mark.parametrize("model", ["paper", "released"])
def test_no_plan_beats_its_bound(model: str, memory: float) -> None:
    asked = request(model, memory, selective=True)
    outcome = optimize(asked)
    predicted = outcome.plan.predicted
    assert predicted.lower_bound_seconds <= predicted.seconds_per_minibatch
    free = optimize(replace(asked, memory=1e12)).plan.predicted
    assert predicted.lower_bound_seconds <= free.seconds_per_minibatch * (1 + 1e-9) or outcome.exact
    if any(stage.by_autograd for stage in outcome.plan.stages):
        assert not outcome.exact
