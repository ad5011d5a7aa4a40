"""Several profiles of one model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from profiled import profile_of

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node, format_graph
from pipedream.graph.profile import Profile, write_profile
from pipedream.optimizer.calibrate.further_profiles import at_their_mean, levels_of
from pipedream.optimizer.cli.planning import plan
from pipedream.optimizer.cli.values import make_options

NODES = {name: Node(name, f"Linear({name})", 1e-3, 2e-3, (1e3,), 1e3) for name in "ab"}
GRAPH = Graph(NODES, (("a", "b"),))


def slower(times: float) -> Profile:
    """The profile, of a time when all passes took so many times as long."""
    made = profile_of(GRAPH)
    totals = made.totals.model_copy(
        update={"forward_seconds": 2e-3 * times, "backward_seconds": 4e-3 * times}
    )
    return made.model_copy(update={"totals": totals})


def written(made: Profile, path: Path) -> Path:
    write_profile(made, path)
    return path


def test_times_are_the_mean_of_the_logarithms(tmp_path: Path) -> None:
    path = written(slower(2.25), tmp_path / "other.json")
    levels = levels_of(slower(1.0), GRAPH, [path, path])
    assert levels == pytest.approx([math.log(2.25)] * 2)
    found = at_their_mean(GRAPH, levels[:1])
    assert [n.forward_seconds for n in found.nodes.values()] == pytest.approx([1.5e-3] * 2)
    assert [n.backward_seconds for n in found.nodes.values()] == pytest.approx([3e-3] * 2)
    assert at_their_mean(GRAPH, ()) is GRAPH


def test_what_was_measured_in_another_way_is_refused(tmp_path: Path) -> None:
    other = slower(1.0).model_copy(update={"batch_size": slower(1.0).batch_size + 1})
    with pytest.raises(UserError, match=r"^--again .*other.json: its batch size is"):
        levels_of(slower(1.0), GRAPH, [written(other, tmp_path / "other.json")])
    alone = Graph({"a": NODES["a"]}, ())
    with pytest.raises(UserError, match=r"the profile of another graph"):
        levels_of(slower(1.0), alone, [written(slower(1.0), tmp_path / "other.json")])


def test_pd_optimize_takes_both(tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text(format_graph(GRAPH))
    given = {"machines": "2", "bandwidth": "1TB", "straight": True}

    def said(**more: object) -> tuple[float, float]:
        options = make_options(tmp_path / "graph.txt", {**given, **more})
        predicted = plan(options).outcome.plan.predicted
        assert predicted.expected_interval is not None
        least, most = predicted.expected_interval
        return predicted.seconds_in_a_run, most / least

    with pytest.raises(UserError, match=r"^--again .*there is no .*profile.json"):
        said(again=(tmp_path / "other.json",))
    written(slower(1.0), tmp_path / "profile.json")
    alone = said()
    twice = said(again=(written(slower(2.25), tmp_path / "other.json"),))
    assert twice[0] == pytest.approx(1.5 * alone[0], rel=0.01)
    assert twice[1] > alone[1]
    same = said(again=(written(slower(1.0), tmp_path / "other.json"),))
    assert same[0] == pytest.approx(alone[0])
    assert same[1] < alone[1]
