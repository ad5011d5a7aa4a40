"""Plans that keep groups of nodes whole, as the command makes them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from commands import typed

from pipedream.graph.model import read_graph
from pipedream.graph.plan import read_plan
from pipedream.graph.profile import read_profile
from pipedream.optimizer.cuts.groups import whole_modules
from pipedream.optimizer.cuts.planning_graph import PlanningGraph

GPT2 = Path(__file__).parents[3] / "profiles" / "gpt2"
CLUSTER = ("--machines", "2", "--bandwidth", "1GB", "--straight")


def test_blocks_are_kept_whole(tmp_path: Path) -> None:
    done = typed(
        tmp_path, ["pd-optimize", str(GPT2 / "graph.txt"), *CLUSTER, "--group", "module", "-o", "p"]
    )
    assert done.code == 0, done.error
    plan = read_plan(tmp_path / "p" / "plan.json")
    modules = read_profile(GPT2 / "profile.json").modules
    graph = read_graph(GPT2 / "graph.txt")
    groups = [set(group) for group in whole_modules(PlanningGraph.of(graph), modules)]
    blocks = [g for g in groups if any(".h.3." in modules[name] for name in g)]
    assert len(blocks) == 1
    assert len(blocks[0]) > 10
    assert len(plan.stages) == 2
    for stage in plan.stages:
        own = set(stage.nodes)
        assert all(group <= own or not group & own for group in blocks)
    assert "groups" in done.out


def test_modules_are_named_by_the_profile(tmp_path: Path) -> None:
    shutil.copy(GPT2 / "graph.txt", tmp_path)
    done = typed(tmp_path, ["pd-optimize", "graph.txt", *CLUSTER, "--group", "module", "-o", "p"])
    assert done.code == 2
    assert "--group module: needs the profile.json beside graph.txt" in done.error


@pytest.mark.parametrize("group", ["fusion", "module"])
def test_groups_are_of_plans_that_are_searched(tmp_path: Path, group: str) -> None:
    words = ["pd-optimize", str(GPT2 / "graph.txt"), *CLUSTER[:-1], "--group", group, "-o", "p"]
    done = typed(tmp_path, [*words, "--split", "node20"])
    assert done.code == 2
    assert f"leave out --group {group}" in done.error


def test_a_profile_that_cannot_be_read_is_not_left_out_without_a_word(tmp_path: Path) -> None:
    """Plans were made without meshes, memory and modules then."""
    shutil.copy(GPT2 / "graph.txt", tmp_path)
    text = (GPT2 / "profile.json").read_text()
    (tmp_path / "profile.json").write_text(text.replace('"batch_size"', '"batch_sizes"', 1))
    done = typed(tmp_path, ["pd-optimize", "graph.txt", *CLUSTER, "-o", "p"])
    assert done.code == 2
    assert done.error.startswith("pd-optimize: profile.json:")
