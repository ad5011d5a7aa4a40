"""Plans in an order of passes of their own, against all divisions of small graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node, format_graph
from pipedream.graph.plan import read_plan
from pipedream.optimizer.choose.chooser import best_plan
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.choose.ordered import best_ordered_plan, even, limits, shapes
from pipedream.optimizer.choose.ordered_trials import OrderedTrials
from pipedream.optimizer.cli.command import main
from pipedream.optimizer.cost.models import NetworkCost
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request
from pipedream.schedule.checker import check_ranks
from pipedream.schedule.orders.named import ROUND_ORDERS
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec, in_order_of


@pytest.fixture(autouse=True)
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each order that is found: hundreds are."""
    monkeypatch.setattr("pipedream.schedule.orders.auto.EFFORT", 20_000)


def chain(nodes: int, seed: int = 0, activation: float = 1e3, parameters: float = 1e3) -> Graph:
    """Nodes one after the other, of which the slowest takes up to five times the fastest."""
    chance = random.Random(seed)
    named = {
        f"n{i}": Node(
            f"n{i}",
            "Linear",
            chance.uniform(1e-3, 5e-3),
            chance.uniform(2e-3, 1e-2),
            (activation,),
            parameters,
        )
        for i in range(nodes)
    }
    return Graph(named, tuple(zip(list(named), list(named)[1:], strict=False)))


def request(graph: Graph, devices: int, order: str, **changes: object) -> Request:
    cluster = Cluster(machines=(devices,), bandwidth=(1e9,))
    settings = {"schedule": "flush", "microbatches": 4, "order": order} | changes
    return Request(graph, cluster, NetworkCost(), **settings)


def seconds_of(outcome: Outcome) -> float:
    simulated = outcome.plan.predicted.simulated
    assert simulated is not None
    return simulated.seconds_per_minibatch


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("order", "devices", "nodes"),
    [
        ("zb-h1", 2, 7),
        ("zb-h2", 3, 7),
        ("interleaved", 2, 7),
        ("zb-v", 2, 8),
        ("v-half", 2, 7),
        ("v-min", 2, 6),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_all_cuts_is_found(order: str, devices: int, nodes: int, seed: int) -> None:
    """Within 3 %: it is a local search. Of straight pipelines, with two stages on a rank or one."""
    wanted = request(chain(nodes, seed), devices, order, rules=Rules(straight=True))
    chosen = best_ordered_plan(wanted)
    best = float("inf")
    for shape in shapes(wanted, order):
        trials = OrderedTrials(wanted, order, shape)
        for ends in combinations(range(1, nodes), len(shape.places) - 1):
            downsets = tuple((1 << end) - 1 for end in (*ends, nodes))
            tried = trials.try_out(Division(downsets, shape.of_stages))
            assert tried is not None
            best = min(best, tried.seconds)
    assert best <= seconds_of(chosen) + 1e-12
    assert seconds_of(chosen) <= best * 1.03
    assert chosen.plan.predicted.lower_bound_seconds <= best


@pytest.mark.slow
@pytest.mark.one_in(5)
@pytest.mark.parametrize("order", [*ROUND_ORDERS, "best"])
def test_every_order_makes_plans_that_are_sound(order: str) -> None:
    """As a run would have them, with replicas and without."""
    for straight in (True, False):
        wanted = request(chain(9), 4, order, rules=Rules(straight=straight), microbatches=6)
        plan = best_ordered_plan(wanted).plan
        assert plan.workers == 4
        assert (plan.order_times is None) == (plan.order != "auto")
        spec = PipelineSpec("flush", plan.replicas, plan.links, 6)
        schedule = Schedule(in_order_of(plan, spec), 15)
        assignment = plan.rank_assignment
        of_rank: dict[int, list[tuple[int, int]]] = {}
        for stage, replica in schedule.workers:
            of_rank.setdefault(assignment[stage][replica].leader, []).append((stage, replica))
        actions = {rank: schedule.actions(*own) for rank, own in of_rank.items()}
        check_ranks(schedule, actions, assignment)


@pytest.mark.thorough
def test_auto_is_never_slower_than_a_named_order_with_the_same_stages() -> None:
    for seed in range(4):
        wanted = request(chain(8, seed), 2, "auto", rules=Rules(straight=True))
        for order in ("zb-h1", "zb-h2", "interleaved", "zb-v", "v-half", "v-min"):
            for shape in shapes(wanted, order):
                division = even(wanted.planning, shape)
                named = OrderedTrials(wanted, order, shape).try_out(division)
                found = OrderedTrials(wanted, "auto", shape).try_out(division)
                assert named is not None
                assert found is not None
                assert found.seconds <= named.seconds * (1 + 1e-6)


@pytest.mark.slow
def test_best_is_that_of_1f1b_where_that_is_faster() -> None:
    """Data parallelism, say: no pipeline of two or more places is as fast without parameters."""
    small = chain(6, parameters=0.0)
    outcome = best_plan(request(small, 2, "best"))
    assert outcome.plan.order is None
    assert outcome.plan.replicas == (2,)
    assert any(", " in each.schedule for each in outcome.schedules)
    large = best_plan(request(chain(6, parameters=1e7), 2, "best"))
    assert large.plan.order is not None
    times = [each.seconds for each in large.schedules if each.schedule == "flush"]
    assert seconds_of(large) <= min(times)
    longer = [each for each in large.schedules if each.microbatches == 8]
    assert longer[0].seconds <= seconds_of(large)


@pytest.mark.thorough
def test_memory_is_that_of_all_stages_of_a_rank() -> None:
    """With as much as zb-v needs it is taken, with less v-half, which holds less, or recomputation;
    with next to nothing there is no plan.
    """
    graph = chain(8, activation=1e6)
    free = best_ordered_plan(request(graph, 4, "zb-v", rules=Rules(straight=True), microbatches=8))
    assert free.rank_bytes is not None
    held = [
        best_ordered_plan(
            request(graph, 4, order, rules=Rules(straight=True), microbatches=8)
        ).rank_bytes
        for order in ("v-min", "v-half", "zb-v")
    ]
    assert held == sorted(held)
    assert held[0] < held[2]
    tight = request(graph, 4, "zb-v", rules=Rules(straight=True), microbatches=8)
    less = replace(tight, memory=free.rank_bytes * 0.99, recompute="never")
    with pytest.raises(UserError, match="no plan found fits --memory: give --microbatches fewer"):
        best_ordered_plan(less)
    again = best_ordered_plan(replace(less, recompute="auto"))
    assert any(stage.recompute for stage in again.plan.stages)
    auto = best_ordered_plan(replace(less, order="auto"))
    assert auto.rank_bytes is not None
    assert auto.rank_bytes <= free.rank_bytes * 0.99
    assert auto.plan.order_times is not None
    assert auto.plan.order_times.limit_bytes is not None


def test_stages_have_the_devices_of_their_place() -> None:
    """On two machines of two: replicas of a stage next to each other, or those of the pipeline."""
    cluster = Cluster(machines=(2, 2), bandwidth=(1e10, 1e8))
    wanted = Request(chain(8), cluster, NetworkCost(), "flush", order="zb-v", stages_each=2)
    found = {shape.of_stages for shape in shapes(wanted, "zb-v")}
    assert found == {
        ((0,), (1,), (2,), (3,), (3,), (2,), (1,), (0,)),
        ((0, 1), (2, 3), (2, 3), (0, 1)),
        ((0, 2), (1, 3), (1, 3), (0, 2)),
    }


@pytest.mark.parametrize(
    ("order", "activation", "parameters", "limit"),
    [
        ("zb-h1", 1e3, 1e3, "compute"),
        ("zb-h1", 1e8, 1e3, "boundary"),
        ("zb-h1", 1e3, 1e9, "all-reduce"),
        ("zb-v", 1e3, 1e3, "compute"),
        ("zb-v", 1e8, 1e3, "boundary"),
    ],
)
def test_what_limits_the_stages(
    order: str, activation: float, parameters: float, limit: str
) -> None:
    """Messages of 0.1 s or sums of seconds, beside passes of some 10 ms."""
    wanted = request(chain(8, activation=activation, parameters=parameters), 4, order)
    shape = next(each for each in shapes(wanted, order) if each.replicas[0] == 2)
    trial = OrderedTrials(wanted, order, shape).try_out(even(wanted.planning, shape))
    assert trial is not None
    assert set(limits(trial.plan, wanted)) == {limit}


@pytest.mark.parametrize(("size", "limit"), [(12e6, "compute"), (18e6, "boundary")])
def test_the_port_of_a_rank_is_compared_with_all_its_stages(size: float, limit: str) -> None:
    """A rank has two stages of 15 ms, and sends one activation and one gradient of `size`."""
    nodes = {f"n{i}": Node(f"n{i}", "Linear", 5e-3, 1e-2, (size,), 0.0) for i in range(4)}
    wanted = request(Graph(nodes, (("n0", "n1"), ("n1", "n2"), ("n2", "n3"))), 2, "zb-v")
    (shape,) = shapes(wanted, "zb-v")
    trial = OrderedTrials(wanted, "zb-v", shape).try_out(even(wanted.planning, shape))
    assert trial is not None
    assert limits(trial.plan, wanted) == [limit] * 4


def typed(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_typed_and_typed_again_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = tmp_path / "graph.txt"
    graph.write_text(format_graph(chain(8, parameters=1e7)))
    words = ("--machines", 2, "--bandwidth", "1GB", "--order", "zb-v", "-o", tmp_path / "plan")
    assert typed(graph, *words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "flush in order zb-v" in shown
    assert "A rank holds up to" in shown
    plan = read_plan(tmp_path / "plan/plan.json")
    assert (plan.order, plan.rank_map) == ("zb-v", (0, 1, 1, 0))
    like = ("--like", tmp_path / "plan/plan.json", "-o", tmp_path / "again")
    assert typed(graph, *like) == 0
    again = read_plan(tmp_path / "again/plan.json")
    assert again.stages == plan.stages


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--order", "zb-v", "--schedule", "gpipe"), "leave out --schedule gpipe"),
        (("--order", "auto", "--objective", "latency"), "leave out --objective latency"),
        (("--order", "best", "--cost-model", "paper"), "leave out --cost-model paper"),
        (("--stages-per-rank", "2"), "order 1f1b has one stage on each rank"),
        (("--order", "zb-v", "--stages-per-rank", "3"), "no such pipeline of 3 stages on each"),
        (("--order", "interleaved", "--stages-per-rank", "4"), "for 3 devices and 8 nodes"),
    ],
)
def test_what_excludes_an_order_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    graph = tmp_path / "graph.txt"
    graph.write_text(format_graph(chain(8)))
    assert typed(graph, "--machines", 3, "--bandwidth", "1GB", "-o", tmp_path / "o", *words) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1
