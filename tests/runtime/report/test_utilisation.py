"""What the ranks spent their time on, by hand and against the simulation's own definition."""

from __future__ import annotations

import pytest
from played import played
from schedules import policy

from pipedream.graph.timeline import Event
from pipedream.runtime.report.utilisation import in_flight, measure_utilisation, versions
from pipedream.schedule.action import parse_action
from pipedream.schedule.steady_state import SteadySpan


def events(text: str) -> list[Event]:
    """`0F0 0-1, 0B0 2-4`: an action and from when to when it ran."""
    found = []
    for part in text.split(", "):
        action, _, span = part.partition(" ")
        begin, end = map(float, span.split("-"))
        found.append(Event(parse_action(action), begin, end))
    return found


TWO = {
    0: events("0F0 0-1, 0F1 1-2, 0RG0<1 2-3, 0B0 3-5, 0U0@1 5-6, 0RG1<1 6-7, 0B1 7-9, 0U1@2 9-10"),
    1: events("1RA0<0 0-1, 1F0 1-2, 1B0 2-3, 1U0@1 3-4, 1RA1<0 4-4, 1F1@1 4-5, 1B1@1 5-7"),
}


def test_shares_of_a_whole_epoch():
    found = measure_utilisation([TWO], None)
    assert found.window == 10.0
    assert found.busy(0) == pytest.approx(0.8)
    assert found.busy(1) == pytest.approx(0.6)
    assert found.share(0, ["RG"]) == pytest.approx(0.2)
    assert found.bubble == pytest.approx(0.3)
    assert not found.steady


def test_shares_of_a_part_cut_the_actions_at_its_ends():
    """From when minibatch 0 had gone backward everywhere, at 5, to when 1 had, at 9."""
    found = measure_utilisation([TWO, TWO], SteadySpan(2, 1, 2))
    assert found.window == 8.0
    assert found.seconds_per_minibatch == 4.0
    assert found.busy(0) == pytest.approx(3 / 4)
    assert found.busy(1) == pytest.approx(2 / 4)


def test_a_full_pipeline_has_no_bubble():
    """Passes of equal length on two stages: 1F1B leaves nothing idle once it is full."""
    counted = SteadySpan.within(policy("weight-stashing", (1, 1)), 20)
    assert counted == SteadySpan(20, 2, 18)
    found = measure_utilisation([played((1, 1), 20)], counted)
    assert found.bubble == pytest.approx(0.0, abs=1e-9)
    assert measure_utilisation([played((1, 1), 20)], None).bubble > 0.01


def test_minibatches_in_flight_and_versions_held():
    assert in_flight(TWO[0]) == [(0, 1), (1, 2), (5, 1), (9, 0)]
    assert versions(TWO[0]) == [(1, 1), (2, 1), (5, 1), (6, 2), (9, 1), (10, 1)]


def test_nothing_was_done():
    assert measure_utilisation([], None).window == 0.0
