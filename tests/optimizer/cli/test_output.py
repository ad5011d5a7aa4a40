"""Pictures and tables of plans whose stages are on meshes: what they say is what the plans say."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from commands import typed

from pipedream.graph.model import read_graph
from pipedream.graph.placements.operators import Operator, read_operators
from pipedream.graph.plan import Plan, read_plan, write_plan
from pipedream.graph.units import show_seconds
from pipedream.optimizer.report.tables import show_meshes
from pipedream.profiler.timing.local_parts import worth_most
from pipedream.sharding.local_times import LocalTimes
from pipedream.sharding.planned import planned_strategies

OPTIONS = ("--machines", "4", "--bandwidth", "1TB", "--schedule", "flush", "--microbatches", "2")


def planned(folder: Path, name: str, *options: str) -> tuple[Plan, str]:
    """The plan in the folder `name`, and the report."""
    done = typed(folder, ["pd-optimize", "graph.txt", *OPTIONS, "-o", name, *options])
    assert done.code == 0, done.error
    return read_plan(folder / name / "plan.json"), done.out


def simulated(plan: Plan) -> float:
    assert plan.predicted.simulated is not None
    return plan.predicted.simulated.seconds_per_minibatch


@pytest.mark.slow
def test_the_timeline_has_all_devices_of_a_mesh(perceptron: Path) -> None:
    """The devices of a worker do the same at the same time."""
    nodes = read_graph(perceptron / "graph.txt").order
    split = "--split", nodes[len(nodes) // 2]
    plan, said = planned(perceptron, "drawn", "--mesh", "2", *split, "--timeline")
    assert "timeline.png, timeline.json, memory.png" in said
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3)]
    events = json.loads((perceptron / "drawn/timeline.json").read_text())["traceEvents"]
    passes: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    held: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            passes[event["pid"]].append((event["name"], event["ts"], event["dur"]))
        elif event["ph"] == "C":
            held[event["pid"]].append((event["ts"], *event["args"].values()))
    assert sorted(passes) == sorted(held) == [0, 1, 2, 3]
    for first, second in ((0, 1), (2, 3)):
        assert passes[first] == passes[second]
        assert held[first] == held[second]
    assert passes[0] != passes[2]
    for rank in range(4):
        assert max(most for _, most in held[rank]) == pytest.approx(
            plan.stages[rank // 2].memory_bytes
        )


@pytest.mark.slow
def test_plans_on_meshes_are_compared_with_others(perceptron: Path) -> None:
    plan, said = planned(perceptron, "compared", "--mesh", "2", "--compare")
    alone, _ = planned(perceptron, "alone", "--intra-op", "none")
    frame = pd.read_csv(perceptron / "compared/compare.csv", keep_default_na=False).set_index(
        "plan"
    )
    assert list(frame["mesh"])[:2] == ["2", ""]
    assert set(frame["mesh"][1:]) == {""}
    seconds = frame["simulated_seconds_per_minibatch"]
    assert float(seconds["this plan"]) == pytest.approx(simulated(plan))
    assert float(seconds["workers of one device"]) == pytest.approx(simulated(alone))
    (row,) = (line for line in said.splitlines() if line.strip().startswith("this plan"))
    assert " 2 " in row
    assert " mesh " in said


@pytest.mark.slow
def test_all_meshes_that_were_tried_are_compared(perceptron: Path) -> None:
    plan, said = planned(perceptron, "every", "--compare", "--intra-op", "exact")
    frame = pd.read_csv(perceptron / "every/compare.csv", keep_default_na=False)
    tried = re.findall(r"(\d+(?: x \d+)?): [\d.]+ [mu]?s", said)
    assert tried
    own = {show_meshes(plan)} - {""}
    assert set(frame["mesh"]) == {"", *tried} | own


@pytest.mark.slow
def test_the_sweep_has_plans_on_the_mesh(perceptron: Path) -> None:
    plan, _ = planned(perceptron, "swept", "--mesh", "2", "--sweep", "1..4")
    frame = pd.read_csv(perceptron / "swept/sweep.csv", keep_default_na=False).set_index("workers")
    assert list(frame["mesh"]) == ["", "2", "", "2"]
    assert [frame["stages"][workers] for workers in (1, 3)] == ["", ""], "no teams of two"
    assert 1 / float(frame["plan_simulated"][4]) == pytest.approx(simulated(plan))
    two, _ = planned(perceptron, "two", "--mesh", "2", "--machines", "2")
    assert 1 / float(frame["plan_simulated"][2]) == pytest.approx(simulated(two))


@pytest.mark.thorough
@pytest.mark.slow
def test_what_is_shown_changes_no_plan(perceptron: Path) -> None:
    """Options that draw and compare were once refused beside meshes, or led to other plans."""
    plain, _ = planned(perceptron, "plain")
    shown, said = planned(perceptron, "shown", "--timeline", "--compare", "--sweep", "1..2")
    assert shown == plain
    assert "Plans for other numbers of workers" in said


@pytest.mark.slow
def test_the_graph_of_a_plan_on_meshes_has_corrected_times(perceptron: Path) -> None:
    """Those of whole nodes, after --calibrate as well."""
    planned(perceptron, "whole", "--intra-op", "none", "--straight", "--machines", "2")
    words = ["pd-train", "whole/plan.json", "--config", "run.yaml", "-o", "run"]
    done = typed(perceptron, words)
    assert done.code == 0, done.error
    for name, mesh in (("one", ("--intra-op", "none")), ("other", ("--mesh", "2"))):
        planned(perceptron, name, "--calibrate", "run", *mesh)
    one, other = (read_graph(perceptron / name / "graph.txt") for name in ("one", "other"))
    before = read_graph(perceptron / "graph.txt")
    assert other.arrays.forward == pytest.approx(one.arrays.forward)
    assert other.arrays.forward != pytest.approx(before.arrays.forward)


@pytest.mark.slow
def test_the_report_has_the_same_stages_without_meshes(perceptron: Path) -> None:
    """A replica on each of two devices: the plan that --replicas makes."""
    _, said = planned(perceptron, "meshes", "--mesh", "2", "--machines", "2")
    other, _ = planned(perceptron, "replicas", "--replicas", "2", "--machines", "2")
    (line,) = (each for each in said.splitlines() if each.startswith("The same stages without"))
    seconds = show_seconds(simulated(other))
    assert f"a replica on each device: {seconds} per minibatch" in line
    assert "Mesh 2: axis 0 of 2: " in said
    assert "is taken to divide evenly. pd-profile --shards plan.json" in said


@pytest.mark.slow
def test_the_parts_of_a_plan_are_timed(perceptron: Path) -> None:
    """What a device has of each operator, so that nothing of the plan is guessed any more."""
    plan, said = planned(perceptron, "guessed", "--mesh", "4")
    assert "parts of operators that were not timed" in said
    before = read_operators(perceptron / "operators.json")
    words = ["pd-profile", "run.yaml", "-o", "timed", "--repeats", "2", "--shards"]
    done = typed(perceptron, [*words, "guessed/plan.json"])
    assert done.code == 0, done.error
    operators = read_operators(perceptron / "timed/operators.json")
    (stage,) = plan.stages
    assert stage.placements is not None
    of_plan = planned_strategies(stage.placements.operators, operators.graph, operators.nodes, (4,))
    assert of_plan.keys() == {call.name for call in operators.graph.calls}
    taken: dict[Operator, float] = defaultdict(float)
    for call in operators.graph.calls:
        taken[call.operator] += operators.seconds.get(call.name, 0.0)
    worth = set(worth_most(taken, 0.99))  # of a busy machine not all are
    products = [
        call
        for call in operators.graph.calls
        if call.operator in worth and call.operator.family in ("aten.mm", "aten.addmm")
    ]
    assert products
    times, guessed = (LocalTimes.of(each.local_seconds) for each in (operators, before))
    for product in products:
        assert times.is_timed(product.operator, of_plan[product.name], (4,))
    assert not all(guessed.is_timed(c.operator, of_plan[c.name], (4,)) for c in products)
    other = plan.graph.model_copy(update={"fingerprint": "0" * 16})
    write_plan(plan.model_copy(update={"graph": other}), perceptron / "other.json")
    done = typed(perceptron, [*words, "other.json"])
    assert done.code == 2
    assert "--shards: the plan is of another model" in done.error
