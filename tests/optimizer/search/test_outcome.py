"""How many minibatches a plan has in flight: for its pace, and within its memory."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pipedream.graph.choices import InFlight
from pipedream.graph.cluster import Cluster
from pipedream.graph.model import Graph, Node
from pipedream.graph.plan import Plan
from pipedream.optimizer.cost.models import COST_MODELS
from pipedream.optimizer.search.outcome import fixed_outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulator import simulate_plan

FAST = 1e12
"""Bytes per second of a network that takes next to no time."""

SECONDS = (0.03, 0.06, 0.03, 0.03)
"""Of four layers: on five devices the second runs on two of them, the others on one each."""


def graph() -> Graph:
    names = [f"node{i}" for i in range(len(SECONDS))]
    nodes = {
        name: Node(name, "Layer", s / 3, 2 * s / 3, (1e6,), 1e3)
        for name, s in zip(names, SECONDS, strict=True)
    }
    return Graph(nodes, tuple(pairwise(names)))


def planned(
    memory: float | None = None,
    in_flight: InFlight = "useful",
    bandwidth: float = FAST,
    sizes: tuple[int, ...] = (1, 2, 1, 1),
) -> Plan:
    cluster = Cluster(machines=(sum(sizes),), bandwidth=(bandwidth,))
    model = COST_MODELS["paper"](None)
    asked = Request(graph(), cluster, model, memory=memory, in_flight=in_flight)
    return fixed_outcome(asked, (1, 2, 3, 4), sizes).plan


def seconds(plan: Plan) -> float:
    found = simulate_plan(plan, graph(), update_rate=FAST)
    assert found is not None
    return found.seconds_per_minibatch


def test_a_plan_with_replicas_keeps_the_pace_it_promises() -> None:
    """By PipeDream's number two replicas between single ones wait half of the time."""
    useful, least = planned(), planned(in_flight="least")
    assert least.max_in_flight == (5, 2, 2, 1)
    assert useful.max_in_flight == (8, 3, 2, 1)
    assert seconds(useful) == pytest.approx(0.03, rel=0.01)
    assert seconds(least) > 1.4 * 0.03


def test_slow_messages_take_more_in_flight() -> None:
    """A megabyte in 20 ms each way, a third of what the slowest stage takes."""
    slow, chain = 1e6 / 0.02, (1, 1, 1, 1)
    assert planned(sizes=chain).max_in_flight == (4, 3, 2, 1)
    useful = planned(sizes=chain, bandwidth=slow)
    least = planned(sizes=chain, bandwidth=slow, in_flight="least")
    assert useful.max_in_flight == (6, 4, 2, 1)
    assert seconds(useful) == pytest.approx(0.06, rel=0.01)
    assert least.max_in_flight == (4, 3, 2, 1)
    assert seconds(least) == pytest.approx(0.07, rel=0.01)


def test_memory_keeps_them_fewer() -> None:
    """Down to PipeDream's number, by which the plan was sought."""
    useful, least = planned(), planned(in_flight="least")
    most = max(stage.memory_bytes for stage in useful.stages)
    fewest = max(stage.memory_bytes for stage in least.stages)
    limits = []
    for memory in (most, (most + fewest) / 2, fewest):
        plan = planned(memory=memory)
        assert max(stage.memory_bytes for stage in plan.stages) <= memory
        limits.append(plan.max_in_flight or ())
    assert limits[0] == useful.max_in_flight
    assert limits[0] > limits[1] > limits[2]
    assert limits[2][0] == 5
