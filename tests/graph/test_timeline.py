"""The pictures show what they say they show."""

from __future__ import annotations

import json

import pytest
from charts import timed
from matplotlib.axes import Axes
from pipelines import of_rounds
from played import played

from pipedream.graph import timeline
from pipedream.graph.timeline import Event, Panel, draw, memory_png, panels_png, write_chrome
from pipedream.schedule.action import Action
from pipedream.schedule.orders.literature import vee
from pipedream.schedule.orders.named import round_of


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
    assert "digits, from minibatch 0 of 30" in texts
    assert "time in ms" in texts
    assert {"rank 0: stage 0", "rank 1: stage 0, replica 1", "rank 2: stage 1"} <= set(texts)
    assert {"forward", "backward"} <= set(texts)
    assert "send" not in texts  # takes no time here
    assert texts.count("5") >= 4  # forward and backward at either stage


def test_stages_of_a_rank_differ_in_shade(tmp_path, texts, monkeypatch):
    """Two boxes of one colour with the same number were all that was seen of a microbatch."""
    orders, colours = of_rounds("zb-v", vee(2, 2), 4, 4), []
    spec, bars = orders.schedule.spec, Axes.broken_barh
    order = round_of(spec, 4)
    ranks = {
        place: [
            Event(Action(each.kind, each.stage, 0, each.microbatch, 0), *seconds)
            for each, seconds in zip(own, times, strict=True)
        ]
        for place, (own, times) in enumerate(zip(order, timed(spec, order), strict=True))
    }

    def spy(axes, spans, *args, facecolors, **more):
        colours.append(set(facecolors))
        return bars(axes, spans, *args, facecolors=facecolors, **more)

    monkeypatch.setattr(Axes, "broken_barh", spy)
    draw(ranks, tmp_path / "timeline.png", "V")
    assert "rank 0: stages 0, 3 (later ones lighter)" in texts
    assert "rank 1: stages 1, 2 (later ones lighter)" in texts
    forward, *_ = colours
    dark, light = sorted(forward)
    assert len(forward) == 2
    assert all(one < other for one, other in zip(dark, light, strict=True))


def test_a_title_is_text_not_mathematics(tmp_path):
    """A folder of this name ended a run whose training was over, before its summary."""
    draw(played((1, 1), 3), tmp_path / "timeline.png", r"run$\frac$: last epoch")
    assert (tmp_path / "timeline.png").exists()


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


def test_panels_share_a_scale_and_a_legend(texts):
    panels = [Panel("one", played((1, 1), 4)), Panel("other", played((2, 1), 4))]
    assert panels_png(panels).startswith(b"\x89PNG")
    assert {"one, all 4 minibatches", "other, all 4 minibatches"} <= set(texts)
    assert texts.count("forward") == 1


@pytest.mark.slow
def test_only_so_many_ranks_are_drawn(tmp_path, texts):
    draw(played((40, 1), 4), tmp_path / "timeline.png", "wide")
    assert "wide, all 4 minibatches (32 of 41 ranks)" in texts
    assert {"rank 0: stage 0", "rank 40: stage 1"} <= set(texts)


def test_memory_is_drawn_in_a_colour_for_each_stage(texts, monkeypatch):
    drawn = []
    step = Axes.step
    monkeypatch.setattr(
        Axes, "step", lambda *args, **given: drawn.append(given["color"]) or step(*args, **given)
    )
    memory = {0: [(0.0, 1e6), (0.5, 3e6), (1.0, 1e6)], 1: [(0.0, 2e6), (1.0, 2e6)]}
    memory |= {2: memory[1], 3: []}
    memory_png(memory, [(0, 2), (1, 3)], "held", limit=4e6)
    assert {"held (3 of 4 ranks)", "memory in MB", "time in ms"} <= set(texts)
    assert {"stage 0 (2 ranks)", "stage 1 (2 ranks)", "memory of each rank"} <= set(texts)
    assert drawn[0] == drawn[2] != drawn[1]


def test_many_stages_have_as_many_colours():
    assert len(set(timeline._stage_colours(10))) == 10
    assert len(set(timeline._stage_colours(64))) == 64


def test_chrome_trace_has_every_event_in_microseconds(tmp_path):
    ranks = {
        rank: [Event(a, b + 100, e + 100) for a, b, e in events]
        for rank, events in played((2, 1), 5).items()
    }
    write_chrome(
        ranks, tmp_path / "timeline.json", {"memory": {0: [(100.0, 7.0)]}}, {"epoch 1": 100.02}
    )
    found = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    passes = [event for event in found if event["ph"] == "X" and event["pid"] == 2]
    assert [event["name"] for event in passes] == [str(event.action) for event in ranks[2]]
    backward = next(event for event in passes if event["name"] == "1B0")
    assert (backward["ts"], backward["dur"], backward["cat"]) == (30_000.0, 10_000.0, "backward")
    names = [event["args"]["name"] for event in found if event["ph"] == "M"]
    assert names == ["rank 0: stage 0", "rank 1: stage 0, replica 1", "rank 2: stage 1"]
    assert [event["args"] for event in found if event["ph"] == "C"] == [{"memory": 7.0}]
    assert [(event["name"], event["ts"]) for event in found if event["ph"] == "i"] == [
        ("epoch 1", 20_000.0)
    ]
