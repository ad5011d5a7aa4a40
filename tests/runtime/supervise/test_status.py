"""What a rank says of itself, and what rank 0's terminal makes of it."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from schedules import assigned
from torch.distributed import HashStore

from pipedream.graph.plan import workers_by_rank
from pipedream.graph.timeline import Event
from pipedream.runtime.report.live_table import in_words, table
from pipedream.runtime.supervise import status as live
from pipedream.runtime.supervise.status import (
    Status,
    current_status,
    published_statuses,
    publishing_status,
)
from pipedream.schedule.action import parse_action

RANKS = assigned([(0,), (2, 1)])
NAMES = ["0F0", "0F2", "0RG0<1", "0B0", "0U0@1", "0RG2<1.1", "0B2"]
ACTIONS = [parse_action(text) for text in NAMES]


def done(*spans: tuple[float, float]) -> list[Event]:
    return [Event(action, *span) for action, span in zip(ACTIONS, spans, strict=False)]


def test_the_action_under_way_counts():
    """Passes of 1 s and 2 s, 1 s of waiting for rank 2, and by now 4 s for rank 1."""
    events = done((0, 1), (1, 2), (2, 3), (3, 5), (5, 6))
    found = current_status(events, ACTIONS[len(events)], RANKS, 0.0, 10.0, 7)
    assert found == Status(
        minibatch=0,
        forward=1.0,
        backward=2.0,
        busy=pytest.approx(1 / 5),
        waiting=pytest.approx(4 / 5),
        waits_for="rank 1",
        stuck=4.0,
        memory=7,
    )


def test_only_recent_seconds_count():
    events = done((0, 1), (1, 2), (2, 3))
    found = current_status(events, ACTIONS[len(events)], RANKS, 0.0, 7.5, 7)
    assert (found.minibatch, found.busy, found.waits_for) == (0, 1.0 - 0.5 / 5, "rank 2")
    assert found.waiting == pytest.approx(0.5 / 5)


def test_before_the_first_action_and_after_the_last():
    first = current_status([], ACTIONS[0], RANKS, 1.0, 2.0, 7)
    assert (first.minibatch, first.forward, first.busy) == (0, None, 1.0)
    over = current_status(done(*[(i, i + 1) for i in range(7)]), None, RANKS, 0.0, 7.0, 7)
    assert (over.minibatch, over.stuck) == (2, 0.0)
    nothing = current_status([], None, RANKS, 1.0, 2.0, 7)
    assert (nothing.minibatch, nothing.busy, nothing.waits_for) == (None, 0.0, None)


def test_very_many_short_actions_are_not_all_looked_through(monkeypatch):
    monkeypatch.setattr(live, "_MOST_EVENTS", 2)
    found = current_status(done((0, 1), (1, 2), (2, 3), (3, 5)), None, RANKS, 0.0, 5.0, 7)
    assert found.busy == pytest.approx(2 / 3)


STATUS = Status(4, 0.001, 0.002, 0.9, 0.1, "rank 1", 0.0, 5_000_000)


def test_what_is_told_is_heard():
    store = HashStore()
    with publishing_status(store, 3, lambda: STATUS, torch.device("cpu")):
        assert published_statuses(store, [2]) == {}
    assert published_statuses(store, [2, 3]) == {3: STATUS}


def shown(statuses, ranks=RANKS, most=10) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(table(statuses, workers_by_rank(ranks), most))
    return console.file.getvalue()


def test_the_table_has_a_row_for_each_rank():
    stuck = Status(None, None, None, 0.0, 1.0, "its replicas", 12.3, 0)
    text = shown({0: STATUS, 2: stuck})
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 0 0 4 1 ms 2 ms 90% 5 MB rank 1 10%" in rows
    assert "2 1 0 - - - 0% 0 B its replicas for 12 s" in rows
    assert "1 1 1 - - - - - -" in rows


def test_as_many_rows_as_there_is_room_for():
    text = shown({}, assigned([tuple(range(50))]), 20)
    assert "and 30 more" in text
    assert len(text.splitlines()) < 26


def test_the_same_in_a_line():
    assert in_words({}) == ""
    assert in_words({0: STATUS}) == "; busy 90%; rank 0 waits for rank 1 10%"
