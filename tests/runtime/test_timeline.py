"""The trace reads back, and the picture shows what it says it shows."""

from __future__ import annotations

import pytest

from pipedream.graph.command import UserError
from pipedream.runtime import timeline
from pipedream.runtime.schedule import schedule
from pipedream.runtime.timeline import Event, draw, read_trace, write_trace


def played(replicas, minibatches, unit=0.01):
    """The events of a run in which every action takes the time of its place in the play."""
    made = schedule("weight-stashing", replicas, [(0, 1)], minibatches)
    ranks = {}
    for rank, worker in enumerate(made.workers):
        times = {(step.kind, step.minibatch): step.time * unit for step in made.steps[worker]}
        now, events = 0.0, []
        for action in made.actions(worker):
            begin = times.get((action.kind, action.minibatch), now)
            now = begin + (unit if (action.kind, action.minibatch) in times else 0)
            events.append(Event(action, begin, now))
        ranks[rank] = events
    return ranks


def test_trace_reads_back(tmp_path):
    ranks = played((2, 1), 5)
    write_trace(ranks, tmp_path / "trace.csv")
    found = read_trace(tmp_path / "trace.csv")
    assert [e.action for e in found[1]] == [e.action for e in ranks[1]]
    assert found[2][3].begin == pytest.approx(ranks[2][3].begin, abs=1e-9)
    lines = (tmp_path / "trace.csv").read_text().splitlines()
    assert lines[:2] == ["rank,action,begin_seconds,end_seconds", "0,0F0,0.000000000,0.010000000"]


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


@pytest.fixture
def texts(monkeypatch):
    """Every text that a picture saved in the test holds."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    found = []
    save = Figure.savefig

    def spy(figure, *args, **kwargs):
        save(figure, *args, **kwargs)
        found.extend(t.get_text() for t in figure.findobj(Text) if t.get_visible())

    monkeypatch.setattr(Figure, "savefig", spy)
    return found


def test_picture_has_rows_numbers_and_says_what_it_shows(tmp_path, texts):
    draw(played((2, 1), 30), tmp_path / "timeline.png", "digits", count=6)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "digits, minibatches 0 to 5 of 30" in texts
    assert "time in ms" in texts
    assert {"rank 0: stage 0", "rank 1: stage 0.1", "rank 2: stage 1"} <= set(texts)
    assert {"forward", "backward", "all-reduce", "update", "wait for a message"} <= set(texts)
    assert texts.count("5") >= 4  # forward and backward at either stage


def test_numbers_that_do_not_fit_are_left_out(tmp_path, texts):
    draw(played((1, 1), 400), tmp_path / "timeline.png", "many", count=400)
    assert "many, all 400 minibatches" in texts
    assert "399" not in texts


def test_picture_of_nothing(tmp_path, texts):
    draw({0: [], 1: []}, tmp_path / "timeline.png", "empty")
    assert "rank 1: nothing to do" in texts


@pytest.mark.parametrize(("seconds", "unit"), [(90.0, "s"), (0.3, "ms"), (0.0004, "µs")])
def test_unit(seconds, unit):
    assert timeline._unit(seconds)[1] == unit
