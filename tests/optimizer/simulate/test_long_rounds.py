"""Rounds of very many microbatches: the same figures as playing every one of them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from plans import make_plan

from pipedream.graph.model import Graph, Node
from pipedream.graph.plan import Plan
from pipedream.optimizer.simulate import simulator
from pipedream.optimizer.simulate.long_rounds import rounds_to_play
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.optimizer.simulate.simulator import simulate_plan


def chain(seed: int, replicas: tuple[int, ...], microbatches: int) -> tuple[Graph, Plan]:
    """A stage of one node for each of `replicas`, with the flush schedule."""
    draw = random.Random(seed).uniform
    names = [f"n{index}" for index in range(len(replicas))]
    nodes = {
        name: Node(name, "Linear", draw(0.01, 0.1), draw(0.01, 0.2), (draw(0, 5e7),), draw(0, 1e8))
        for name in names
    }
    graph = Graph(nodes, tuple(pairwise(names)))
    plan = make_plan(graph, [[name] for name in names], replicas)
    aim = {"objective": "latency", "microbatches": microbatches, "latency_seconds": 1.0}
    predicted = plan.predicted.model_copy(update=aim)
    return graph, plan.model_copy(update={"schedule": "flush", "predicted": predicted})


def short_and_whole(
    monkeypatch: pytest.MonkeyPatch, graph: Graph, plan: Plan
) -> tuple[Simulation, Simulation]:
    """The plan's rounds extrapolated, and played whole."""
    monkeypatch.setattr(simulator, "QUICK_MOVES", 0)
    short = simulate_plan(plan, graph)
    monkeypatch.setattr(simulator, "QUICK_MOVES", 10**9)
    whole = simulate_plan(plan, graph)
    assert short is not None
    assert whole is not None
    assert len(short.events[0]) < len(whole.events[0]) / 2
    return short, whole


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("replicas", "microbatches"),
    [((1, 1), 925), ((2,), 1395), ((3, 1), 1119), ((2, 2, 1), 648), ((1, 3), 1000), ((3, 2), 630)],
)
def test_as_if_every_microbatch_was_played(
    monkeypatch: pytest.MonkeyPatch, replicas: tuple[int, ...], microbatches: int
) -> None:
    graph, plan = chain(sum(replicas), replicas, microbatches)
    short, whole = short_and_whole(monkeypatch, graph, plan)
    assert short.seconds_per_minibatch == pytest.approx(whole.seconds_per_minibatch, rel=1e-11)
    assert short.bubble == pytest.approx(whole.bubble, abs=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "microbatches"), [((1, 1), 700), ((2, 1), 901), ((1, 1, 2), 600)]
)
def test_rounds_of_gpipe_grow_by_as_much_for_each_period(
    monkeypatch: pytest.MonkeyPatch, replicas: tuple[int, ...], microbatches: int
) -> None:
    graph, plan = chain(3, replicas, microbatches)
    plan = plan.model_copy(update={"schedule": "gpipe"})
    short, whole = short_and_whole(monkeypatch, graph, plan)
    assert short.seconds_per_minibatch == pytest.approx(whole.seconds_per_minibatch, rel=1e-9)
    assert short.bubble == pytest.approx(whole.bubble, abs=1e-3)


def test_one_worker_has_a_closed_form() -> None:
    graph, plan = chain(0, (1,), 10_000_000)
    simulation = simulate_plan(plan, graph, update_rate=1e6)
    (node,) = graph.nodes.values()
    update = node.parameter_bytes / 1e6 / 10_000_000
    assert simulation is not None
    assert simulation.seconds_per_minibatch == pytest.approx(
        node.compute_seconds + update, rel=1e-12
    )
    assert simulation.bubble == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("replicas", [(1,), (2, 3), (4, 1, 1)])
@pytest.mark.parametrize("microbatches", [1, 7, 500, 12_345])
def test_the_real_round_is_the_last_to_be_tried(
    replicas: tuple[int, ...], microbatches: int
) -> None:
    *shorter, last = rounds_to_play(replicas, microbatches)
    assert last.length == microbatches
    assert all(2 * each.length < microbatches for each in shorter)
    assert all((microbatches - each.length) % each.period == 0 for each in shorter)


@pytest.mark.slow
def test_many_replicas_need_no_long_rounds() -> None:
    """Twelve turns of 12 and 4 replicas are 144 microbatches, one turn is twelve."""
    graph, plan = chain(1, (12, 4), 20_000)
    simulation = simulate_plan(plan, graph)
    assert simulation is not None
    passes = {event.action.minibatch for events in simulation.events.values() for event in events}
    assert len(passes) < 1000
