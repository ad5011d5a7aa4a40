"""--split and --replicas: stages of the user's own, priced like any plan, and trained."""

from __future__ import annotations

import io
import json
import math
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from commands import typed
from torch import nn

import pipedream
from pipedream.graph.model import format_graph, read_graph
from pipedream.graph.plan import Plan, read_plan
from pipedream.optimizer.cli.command import main

TRANSLATION = Path(__file__).parents[1] / "translation.txt"
LEVELS = ("--machines", "4", "--bandwidth", "1GB")

BLOCKS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def model():
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*blocks)


def data():
    torch.manual_seed(0)
    return TensorDataset(torch.randn(16, 8), torch.randn(16, 8))


def loss(output, target):
    return (output - target).square().mean()
"""

RUN = """
format: pipedream-run/1
model: {source: "blocks:model"}
data: {source: "blocks:data"}
loss: "blocks:loss"
optimizer: {name: SGD, args: {lr: 0.1}}
batch_size: 4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of eight blocks, `0` to `7`."""
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "blocks.py").write_text(BLOCKS)
    (folder / "run.yaml").write_text(RUN)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]
    profiled = pipedream.profile(nn.Sequential(*blocks), torch.randn(4, 8), repeats=2, warmup=1)
    profiled.write(folder)
    return folder


def planned(folder: Path, *options: str) -> tuple[Plan, str]:
    """What pd-optimize makes, and prints."""
    command = [str(folder / "graph.txt"), *LEVELS, "-o", str(folder / "plan"), *options]
    report = io.StringIO()
    with redirect_stdout(report), main.make_context("pd-optimize", command) as context:
        main.invoke(context)
    return read_plan(folder / "plan/plan.json"), report.getvalue()


def told(folder: Path, *options: str) -> str:
    with pytest.raises(pipedream.UserError) as raised:
        planned(folder, *options)
    line = raised.value.format_message()
    assert "\n" not in line
    return line


def blocks_of(plan: Plan, folder: Path) -> list[int]:
    """How many blocks each stage has."""
    profile = json.loads((folder / "profile.json").read_text())
    module = {node["id"]: node["module"].split(".")[0] for node in profile["nodes"]}
    return [
        len({module[name] for name in stage.nodes if module[name]} - {""}) for stage in plan.stages
    ]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_split_is_priced_trained_and_has_the_memory_of_its_own_stages(folder: Path) -> None:
    """One, two, two and three blocks, for which plan.json had to be edited by hand."""
    plan, out = planned(folder, "--split", "1,3,5")
    assert blocks_of(plan, folder) == [1, 2, 2, 3]
    assert plan.replicas == (1, 1, 1, 1)
    assert [stage.parameter_bytes for stage in plan.stages] == [288 * n for n in (1, 2, 2, 3)]
    for stage in plan.stages:
        assert stage.memory is not None
        assert stage.memory.parameters == stage.parameter_bytes
        assert stage.memory_bytes == stage.memory.total
    predicted = plan.predicted
    assert predicted.simulated is not None
    assert predicted.lower_bound_seconds <= predicted.simulated.seconds_per_minibatch
    assert "The stages of --split; at most" in out
    command = ["pd-train", "plan/plan.json", "--config", "run.yaml", "-o", "run"]
    done = typed(folder, command, seconds=300)
    assert done.code == 0, done.error
    losses = [json.loads(line)["loss"] for line in (folder / "run/metrics.jsonl").open()]
    assert len(losses) == 4
    assert all(map(math.isfinite, losses))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_best_split_is_priced_as_the_planner_prices_it(folder: Path) -> None:
    """Its own stages, given back to it by the names of their first nodes, cost the same."""
    best, _ = planned(folder, "--straight")
    names = ",".join(stage.nodes[0] for stage in best.stages[1:])
    again, _ = planned(folder, "--split", names)
    assert [stage.nodes for stage in again.stages] == [stage.nodes for stage in best.stages]
    assert again.predicted.simulated == best.predicted.simulated
    assert [stage.memory for stage in again.stages] == [stage.memory for stage in best.stages]


def test_nodes_modules_and_the_first_stage_may_be_named(folder: Path) -> None:
    by_module, _ = planned(folder, "--split", "0,2,2.1", "--replicas", "2,1,1")
    first = by_module.stages[1].nodes[0]
    by_node, _ = planned(folder, "--split", f" {first}, 2.1", "--replicas", "2,1,1")
    assert by_module.stages == by_node.stages
    assert by_module.replicas == (2, 1, 1)
    whole, _ = planned(folder, "--replicas", "4")
    assert [len(stage.ranks) for stage in whole.stages] == [4]


def test_it_goes_with_levels_schedules_orders_and_meshes(folder: Path) -> None:
    levels = ("--machines", "2,2", "--bandwidth", "10GB,1GB")
    plan, _ = planned(folder, "--split", "4", "--replicas", "3,1", "--schedule", "flush", *levels)
    assert (plan.schedule, plan.replicas) == ("flush", (3, 1))
    two = ("--machines", "2")
    plan, _ = planned(folder, "--split", "2,4,6", "--order", "interleaved", *two)
    assert (plan.order, blocks_of(plan, folder), plan.workers) == ("interleaved", [2] * 4, 2)
    plan, _ = planned(folder, "--split", "4", "--mesh", "2", "--shard", "*.0=S(0)")
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3)]
    assert {stage.mesh for stage in plan.stages} == {(2,)}


def test_a_plan_that_does_not_fit_is_written_and_says_so(folder: Path) -> None:
    plan, out = planned(
        folder, "--split", "7", "--memory", "3kB", "--room", "0", "--recompute", "never"
    )
    assert plan.stages[0].memory_bytes > 3_000
    assert "Does not fit: stage 0 needs" in out
    _, out = planned(folder, "--split", "7", "--memory", "1GB")
    assert "Does not fit" not in out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--split", "3,3.0"], "--split 3,3.0: 3 and 3.0 both begin with"),
        (["--split", "nine"], "--split nine: no node or module is called nine; "),
        (["--split", "nodes3"], "did you mean node3"),
        (["--split", "1,2,3,4"], "5 stages of 1, 1, 1, 1, 1 workers, and there are 4 of them"),
        (["--split", "4", "--replicas", "4,1"], "2 stages of 4, 1 workers, and there are 4"),
        (["--split", "4", "--replicas", "2"], "--replicas 2: 1 numbers for the 2 stages of"),
        (["--replicas", "2,2"], "1 stages of a plan without --split"),
        (["--split", "4", "--replicas", "two"], "--replicas two: write a number for each stage"),
        (["--split", "4", "--replicas", "0,1"], "--replicas 0,1: write a number for each stage"),
        (["--split", "4", "--straight"], "leave out --straight"),
        (["--split", "4", "--sweep", "1..4"], "leave out --sweep"),
        (["--split", "4", "--cost-model", "paper"], "leave out --cost-model paper"),
        (["--split", "4", "--order", "zb-v"], "--order zb-v: no pipeline of this order"),
    ],
)
def test_mistakes_are_told_in_one_line(folder: Path, options: list[str], line: str) -> None:
    assert line in told(folder, *options)


def test_stages_that_would_send_backwards_are_refused_with_the_edge(folder: Path) -> None:
    graph = read_graph(folder / "graph.txt")
    said = told(folder, "--split", "3,1")
    found = re.search(r"--split 3,1: (\w+) feeds (\w+), so 1 comes before 3 .*: write 1,3", said)
    assert found is not None
    assert graph.predecessors[found[2]] == (found[1],)


def test_without_a_profile_nodes_are_known_alone(tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text(format_graph(read_graph(TRANSLATION)))
    plan, _ = planned(tmp_path, "--split", "enc")
    assert plan.stages[1].nodes[0] == "enc"
    assert "names of modules are in profile.json" in told(tmp_path, "--split", "encoder")
