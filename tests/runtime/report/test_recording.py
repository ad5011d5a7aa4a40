"""What is kept of a long epoch: its end, of the same minibatches on every rank."""

from __future__ import annotations

import pytest
from played import played
from schedules import schedule

from pipedream.graph.choices import ScheduleName
from pipedream.graph.errors import UserError
from pipedream.graph.timeline import Event
from pipedream.runtime.report import recording
from pipedream.runtime.report.clock import Clock
from pipedream.runtime.report.recording import Recorder, read_trace, write_trace
from pipedream.runtime.report.utilisation import in_flight, versions

EPOCH, KEPT = 402, 6


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "KEPT", KEPT)


def recorded(name: ScheduleName, stage: int, every_epoch: bool = False) -> tuple[int, list[Event]]:
    """The most events that there were at once, and those that were kept, of one rank's epoch."""
    recorder = Recorder(Clock(None, stage, 2), every_epoch, 4)  # type: ignore[arg-type]
    recorder.begin()
    actions = schedule(name, (1, 1), [(0, 1)], EPOCH, 4).actions((stage, 0))
    events: list[Event] = []
    most = 0
    for at, action in enumerate(actions):
        events.append(Event(action, float(at), at + 1.0))
        recorder.thin_out(events)
        most = max(most, len(events))
    recorder.add(1, events, EPOCH)
    return most, list(recorder.epochs[1])


@pytest.mark.parametrize("name", ["weight-stashing", "flush", "gpipe"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_long_epoch_takes_no_more_memory_than_a_short_one(name: ScheduleName, stage: int) -> None:
    most, kept = recorded(name, stage)
    assert most < 40 * KEPT < 5 * EPOCH
    whole = schedule(name, (1, 1), [(0, 1)], EPOCH, 4).actions((stage, 0))
    wanted = [action for action in whole if action.minibatch >= 396]
    assert [event.action for event in kept] == wanted
    assert {count for _, count in in_flight(kept)} <= {0, 1, 2, 3, 4}
    bound = {"weight-stashing": 2 - stage, "flush": 1, "gpipe": 1}[name]
    assert max(count for _, count in versions(kept)) == bound


def test_with_a_trace_all_of_it_is_kept() -> None:
    most, kept = recorded("weight-stashing", 0, every_epoch=True)
    assert most == len(kept) == 5 * EPOCH


def test_trace_reads_back(tmp_path):
    ranks = played((2, 1), 5)
    write_trace(ranks, tmp_path / "trace.csv")
    found = read_trace(tmp_path / "trace.csv")
    assert [e.action for e in found[1]] == [e.action for e in ranks[1]]
    assert found[2][3].begin == pytest.approx(ranks[2][3].begin, abs=1e-9)
    lines = (tmp_path / "trace.csv").read_text().splitlines()
    assert lines[:2] == ["rank,action,begin_seconds,end_seconds", "0,0F0,0.000000000,0.020000000"]


@pytest.mark.parametrize(
    ("text", "where"),
    [("", ":1: "), ("rank,action,begin_seconds,end_seconds\n0,0X0,0,1\n", ":2: ")],
)
def test_bad_trace_is_one_line(tmp_path, text, where):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}{where}")
