"""What the passes of ranks took, from events by hand."""

from __future__ import annotations

import pytest
import small_models
import torch
from plans import cut, make_plan

from pipedream.capture.export import capture
from pipedream.graph.plan import Plan
from pipedream.graph.profile import Quartiles
from pipedream.graph.timeline import Event
from pipedream.runtime.report.utilisation import measured_ranks
from pipedream.schedule.action import parse_action


@pytest.fixture(scope="module")
def plan() -> Plan:
    graph = capture(small_models.Chain(), (torch.randn(4, 6),)).graph
    return make_plan(graph, cut(graph, 2), (1, 1))


def events(text: str) -> list[Event]:
    """`0F0 2, 0B0 3`: actions one after the other, and the seconds that each took."""
    found, now = [], 10.0
    for part in text.split(", "):
        action, seconds = part.split()
        found.append(Event(parse_action(action), now, now + float(seconds)))
        now += float(seconds)
    return found


EPOCH = {
    0: events(
        "0F0 9, 0F1 2, 0SA1>1 1, 0RG0<1 9, 0B0 9, 0U0@1 9, 0F2 4, 0SA2>1 3, 0RG1<1 5, 0B1 6,"
        " 0U1@2 1, 0F3 3, 0RG2<1 7, 0B2 8, 0U2@3 2, 0RG3<1 6, 0B3 7, 0U3@4 3"
    ),
    1: events(
        "1RA0<0 9, 1F0 9, 1B0 9, 1RA1<0 1, 1F1 2, 1BI1 3, 1SG1>0 1, 1BW1 4, 1RA2<0 1, 1F2 2,"
        " 1BI2 5, 1BW2 4, 1F3 2, 1B3 11"
    ),
}


def test_medians_and_quartiles_of_the_minibatches_that_count(plan: Plan) -> None:
    first, _ = measured_ranks([EPOCH], range(1, 4), plan)
    assert (first.rank, first.stage, first.replica, first.minibatches) == (0, 0, 0, 3)
    assert first.forward == Quartiles(median=3, lower=2.5, upper=3.5)
    assert first.backward == Quartiles(median=7, lower=6.5, upper=7.5)
    assert (first.updates, first.update) == (3, Quartiles(median=2, lower=1.5, upper=2.5))
    assert first.waiting == Quartiles(median=6, lower=5.5, upper=6.5)
    assert first.sending == Quartiles(median=2, lower=1.5, upper=2.5)
    assert first.all_reduce is None
    assert first.busy_seconds == 3 + 7 + 2


def test_the_halves_of_a_backward_pass_are_one_pass(plan: Plan) -> None:
    _, last = measured_ranks([EPOCH], range(1, 4), plan)
    assert last.backward == Quartiles(median=9, lower=8, upper=10)
    assert (last.updates, last.update) == (0, None)
    assert last.waiting == Quartiles(median=1, lower=1, upper=1)


def test_all_epochs_count(plan: Plan) -> None:
    first, _ = measured_ranks([EPOCH, EPOCH], range(1, 3), plan)
    assert (first.minibatches, first.forward.median) == (4, 3)


def test_where_nothing_is_counted_there_is_nothing(plan: Plan) -> None:
    assert measured_ranks([EPOCH], range(4, 9), plan) == ()
    assert measured_ranks([], range(4), plan) == ()


def test_replicas_are_named_by_their_ranks() -> None:
    graph = capture(small_models.Chain(), (torch.randn(4, 6),)).graph
    plan = make_plan(graph, cut(graph, 2), (1, 2))
    swapped = plan.stages[1].model_copy(update={"ranks": (2, 1)})
    plan = plan.model_copy(update={"stages": (plan.stages[0], swapped)})
    one = {0: "0F0 1, 0B0 1", 1: "1.1F1 2, 1.1B1 2", 2: "1F0 3, 1B0 3"}
    ranks = measured_ranks([{r: events(t) for r, t in one.items()}], range(2), plan)
    assert [(r.rank, r.stage, r.replica, r.forward.median) for r in ranks] == [
        (0, 0, 0, 1),
        (1, 1, 1, 2),
        (2, 1, 0, 3),
    ]
