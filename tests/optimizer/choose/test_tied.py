"""Plans for models whose layers share parameters: they can be trained, and stay the fastest."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from divisions import every_division

from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan
from pipedream.graph.profile import Sharing
from pipedream.optimizer.choose.bound import lower_bound
from pipedream.optimizer.choose.chooser import best_plan
from pipedream.optimizer.choose.placed_trials import PlacedTrials
from pipedream.optimizer.choose.tied import plan_shared
from pipedream.optimizer.compare.comparison import compare
from pipedream.optimizer.cost.models import NetworkCost, PaperCost
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request
from pipedream.schedule.policy import policy
from pipedream.schedule.spec import PipelineSpec

CHAIN = "a b c d e f"
EDGES = " ".join(f"{one}-{other}" for one, other in pairwise(CHAIN.split()))
SLOW, FAST = 1e6, 1e9


@pytest.fixture
def chain(make_graph) -> Graph:
    """Six layers; the second and the fifth share 9 MB, which take long to add up over replicas."""
    return make_graph(CHAIN, EDGES, b=(1, 100, 9_000_000))


def request(graph: Graph, *ends: str, bandwidth: float = FAST, devices: int = 2, **settings):
    sharing = (Sharing("table", ends or ("b", "e"), 9_000_000.0),)
    cluster = Cluster(machines=(devices,), bandwidth=(bandwidth,))
    return Request(graph, cluster, NetworkCost(), sharing=sharing, **settings)


def trains(plan: Plan, ends: tuple[str, ...] = ("b", "e")) -> bool:
    """Whether pd-train would accept it."""
    stages = sorted({plan.stage_of[name] for name in ends})
    rules = policy(PipelineSpec(plan.schedule, plan.replicas))
    ranks = [stage.ranks for stage in plan.stages]
    return len(stages) == 1 or rules.unshared("table", stages, ranks) is None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", ["weight-stashing", "vertical-sync", "flush", "2bw", "gpipe"])
@pytest.mark.parametrize("bandwidth", [SLOW, FAST])
def test_the_plan_of_every_schedule_can_be_trained(chain, schedule, bandwidth) -> None:
    wanted = request(chain, bandwidth=bandwidth, devices=3, schedule=schedule)
    plan = best_plan(wanted).plan
    assert trains(plan)
    for other in compare(wanted, 4, plan):
        assert other.plan is None or trains(other.plan), other.name


@pytest.mark.thorough
@pytest.mark.parametrize("model", [PaperCost(), NetworkCost()])
def test_so_can_those_of_the_formulas_and_of_all_searches(chain, model) -> None:
    wanted = replace(request(chain, bandwidth=SLOW, devices=3), model=model)
    assert trains(optimize(wanted).plan)
    few = optimize(wanted, most_cuts=3)  # over some cuts, with a bound
    assert trains(few.plan)
    assert few.plan.predicted.lower_bound_seconds <= few.plan.predicted.seconds_per_minibatch


def test_none_that_can_be_trained_is_faster_and_the_bound_holds(chain) -> None:
    """Against all divisions of the chain among two devices."""
    wanted = request(chain, "b", "d", bandwidth=SLOW)
    trials = PlacedTrials(wanted)
    tried = [trials.try_out(division) for division in every_division(wanted.planning, 2)]
    allowed = [trial for trial in tried if trial is not None]
    assert 0 < len(allowed) < len(tried)
    assert all(trains(trial.plan, ("b", "d")) for trial in allowed)
    best = min(trial.seconds for trial in allowed)
    assert best_plan(wanted).plan.predicted.simulated.seconds_per_minibatch <= best * 1.02
    assert lower_bound(wanted) <= best * (1 + 1e-9)


def test_an_open_schedule_becomes_a_flush_where_that_is_faster(chain) -> None:
    """Replicas would have to add up 9 MB at 1 MB/s; stages send 100 bytes."""
    wanted = request(chain, bandwidth=SLOW)
    chosen = plan_shared(wanted, any_schedule=True)
    assert (chosen.request.schedule, chosen.outcome.plan.schedule) == ("flush", "flush")
    assert chosen.outcome.plan.replicas == (1, 1)
    (note,) = chosen.notes
    assert "table, read by b and e: weight-stashing keeps these in one stage" in note
    assert "planned with a flush instead" in note


def test_a_schedule_that_was_asked_for_stays(chain) -> None:
    chosen = plan_shared(request(chain, bandwidth=SLOW), any_schedule=False)
    assert chosen.outcome.plan.schedule == "weight-stashing"
    assert trains(chosen.outcome.plan)
    assert "--schedule flush may divide them" in chosen.notes[0]


def test_layers_that_are_together_anyway_change_nothing(chain) -> None:
    """Two neighbours in the middle of a stage."""
    plain = Request(chain, Cluster(machines=(2,), bandwidth=(SLOW,)), NetworkCost())
    free = best_plan(plain).plan
    inside = free.stages[-1].nodes[:2]
    chosen = plan_shared(request(chain, *inside, bandwidth=SLOW), any_schedule=True)
    assert chosen.outcome.plan.schedule == "weight-stashing"
    assert [stage.nodes for stage in chosen.outcome.plan.stages] == [
        stage.nodes for stage in free.stages
    ]
    (note,) = chosen.notes
    assert "a flush would not be faster with them apart" in note


def test_too_few_stages_are_told_in_one_line(chain) -> None:
    """The first and the last layer are tied: one stage, and three devices want one each."""
    wanted = request(chain, "a", "f", devices=3, rules=Rules(straight=True))
    with pytest.raises(UserError) as raised:
        plan_shared(wanted, any_schedule=False)
    told = raised.value.format_message()
    assert "parameter table: what uses it stays in one stage" in told
    assert "--schedule flush" in told
    chosen = plan_shared(wanted, any_schedule=True)
    assert (chosen.outcome.plan.schedule, len(chosen.outcome.plan.stages)) == ("flush", 3)


def test_a_stage_that_has_a_copy_counts_it(chain) -> None:
    """The parameter is counted at its first node; the stage of the other holds it, too."""
    wanted = request(chain, schedule="flush", bandwidth=SLOW, optimizer="adam")
    plan = best_plan(wanted).plan
    first, second = (stage.memory for stage in plan.stages)
    assert first.parameters == 9_000_000 + 1000 * (len(plan.stages[0].nodes) - 1)
    assert second.parameters == 9_000_000 + 1000 * len(plan.stages[1].nodes)
    assert second.optimizer_state == 2 * second.parameters
    assert second.gradients == second.parameters
