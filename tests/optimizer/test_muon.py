"""Plans for Muon: its state and its steps node by node, by what a profile knows of each."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from commands import typed
from plans import make_plan
from profiled import layer, profile
from schedules import policy

from pipedream.graph.cluster import Cluster
from pipedream.graph.model import Graph, Node, format_graph
from pipedream.graph.plan import read_plan
from pipedream.graph.profile import (
    Profile,
    ProfiledUpdate,
    TrainingOverheads,
    read_profile,
    write_profile,
)
from pipedream.optimizer.choose.bound import shared_out
from pipedream.optimizer.cost.memory import MemoryModel, TrainingSettings
from pipedream.optimizer.cost.models import NetworkCost
from pipedream.optimizer.cuts.antichains import all_downsets
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.workload import Workload
from pipedream.schedule.policy import Peak

RATE = 50.0
"""Bytes of parameters per second: 400 in 8 s, of which the table's 320 take 1 and the layer's 80 7.
"""
NAMES = ("node_table", "node_layer", "node_norm")


def told(rate: float | None = RATE) -> Profile:
    """A table, a layer whose matrix has 60 bytes and its bias 20, and something without any."""
    taken: dict[str, dict[str, object]] = {
        "table": {"parameter_bytes": 320, "optimizer_bytes": {"muon": 640}},
        "layer": {"parameter_bytes": 80, "optimizer_bytes": {"muon": 60 + 2 * 20}},
        "norm": {"parameter_bytes": 0, "optimizer_bytes": {"muon": 0}},
    }
    seconds = {"table": 1.0, "layer": 7.0, "norm": 0.0}
    nodes = [
        layer(name, **each, update_seconds={} if rate is None else {"muon": seconds[name]})
        for name, each in taken.items()
    ]
    updates = {"adam": ProfiledUpdate(bytes_per_second=400.0)}
    if rate is not None:
        updates["muon"] = ProfiledUpdate(bytes_per_second=rate)
    return profile(*nodes, updates=updates)


def graph() -> Graph:
    sizes = dict(zip(NAMES, (320.0, 80.0, 0.0), strict=True))
    nodes = {n: Node(n, "Linear()", 1.0, 2.0, (100.0,), size) for n, size in sizes.items()}
    return Graph(nodes, tuple(pairwise(NAMES)))


def states(of: Graph, optimizer: str, ends: tuple[int, int]) -> float:
    planning = PlanningGraph.of(of)
    cuts = Cuts(planning, all_downsets(planning, 10))
    held = MemoryModel(cuts, TrainingSettings("flush", optimizer))  # type: ignore[arg-type]
    found = held.of(*ends, Peak(1, 1), False)
    whole = held.total(ends[0], slice(ends[1], ends[1] + 1), Peak(1, 1), False)
    assert [found.total] == whole.tolist()
    return found.optimizer_state


def test_state_is_that_of_the_nodes_of_a_stage() -> None:
    known = told().updated_by("muon", graph())
    assert [states(known, "muon", ends) for ends in ((0, 1), (1, 3), (0, 3))] == [640, 100, 740]
    # In a graph.txt alone nobody says what is a matrix: not less than it may be.
    assert [states(graph(), "muon", ends) for ends in ((0, 1), (1, 3))] == [640, 160]
    assert states(told().updated_by("adam", graph()), "adam", (1, 3)) == 160


def test_an_update_takes_what_its_nodes_take() -> None:
    """A step's mean rate says 6.4 and 1.6 seconds."""
    known = told().updated_by("muon", graph())
    plan = make_plan(known, [[NAMES[0]], NAMES[1:]], (1, 1), "flush")
    followed = policy("flush", (1, 1), 4)
    for of, expected in ((known, [1.0, 7.0]), (graph(), [6.4, 1.6])):
        work = Workload.of(plan, followed, of, RATE)
        assert [stage.update_seconds for stage in work.stages] == pytest.approx(expected)
        assert [stage.parameter_bytes for stage in work.stages] == [320, 80]
    overheads = TrainingOverheads({"muon": RATE}, gradient_sum_rate=100.0)
    two = Cluster(machines=(2,), bandwidth=(1e9,))
    asked = Request(known, two, NetworkCost(), "flush", update_rate=RATE, overheads=overheads)
    asked = replace(asked, microbatches=4, optimizer="muon")
    # Of four minibatches one update, and three sums of gradients at 100 bytes per second.
    assert asked.planning.update_seconds.tolist() == pytest.approx([1 / 4 + 2.4, 7 / 4 + 0.6, 0.0])
    assert shared_out(asked) >= (3 * 3 + 8 / 4) / 2


def test_a_profile_from_before_says_nothing_of_muon(tmp_path: Path) -> None:
    plain = graph()
    assert told(None).updated_by("muon", plain) is plain
    write_profile(told(None), tmp_path / "profile.json")
    old = json.loads((tmp_path / "profile.json").read_text())
    for node in old["nodes"]:
        del node["update_seconds"]
    (tmp_path / "profile.json").write_text(json.dumps(old))
    assert read_profile(tmp_path / "profile.json") == told(None)


COMMAND = "pd-optimize . --machines 2 --bandwidth 1GB --straight --optimizer muon"


def test_the_command_counts_state_and_steps_by_layer(tmp_path: Path) -> None:
    """And looks for no plan that divides matrices: pd-train would refuse it."""
    (tmp_path / "graph.txt").write_text(format_graph(graph()))
    known = told().model_copy(update={"graph_fingerprint": graph().fingerprint})
    write_profile(known, tmp_path / "profile.json")
    done = typed(tmp_path, [*COMMAND.split(), "--schedule", "flush", "-o", "plan"])
    assert done.code == 0, done.error
    plan = read_plan(tmp_path / "plan" / "plan.json")
    assert plan.optimizer == "muon"
    assert sum(stage.memory.optimizer_state for stage in plan.stages if stage.memory) == 740
    for words, expected in (
        ("--zero always", "--zero always: replicas update parts .* give --optimizer adam"),
        ("--mesh 2", "--mesh: divides matrices, and muon has to see them whole: leave --mesh out"),
        ("--intra-op exact", "--intra-op exact: divides .*: leave --intra-op out, or give"),
    ):
        refused = typed(tmp_path, [*COMMAND.split(), *words.split(), "-o", "refused"])
        assert refused.code == 2
        (line,) = refused.error.splitlines()
        assert line.startswith("pd-optimize: ")
        assert re.search(expected, line), line
