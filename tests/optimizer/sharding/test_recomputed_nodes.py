"""Plans whose stages on meshes recompute single nodes, as memory asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import typed
from sharded_runs import write_config

from pipedream.graph.plan import Plan, read_plan

CLUSTER = ("--machines", "8", "--bandwidth", "1GB", "--mesh", "2")
ROUND = ("--schedule", "flush", "--microbatches", "16")
MEMORY = 230e3


def planned(folder: Path, recompute: str) -> Plan:
    limit = ("--memory", f"{MEMORY:.0f}B", "--recompute", recompute)
    words = ["pd-optimize", "graph.txt", *CLUSTER, *ROUND, *limit, "-o", recompute]
    done = typed(folder, words)
    assert done.code == 0, done.error
    return read_plan(folder / recompute / "plan.json")


@pytest.mark.thorough
@pytest.mark.slow
def test_single_nodes_are_faster_than_whole_stages(tmp_path: Path) -> None:
    """On meshes a stage recomputed all or nothing: of a transformer with 32 sequences a minibatch,
    on four pairs of devices, that takes a fifth longer.
    """
    write_config(tmp_path, "Fused", microbatches=16, batch_size=32, dtype="float32")
    done = typed(tmp_path, ["pd-profile", "run.yaml", "--for", "cpu", "-o", "."])
    assert done.code == 0, done.error
    auto, whole = planned(tmp_path, "auto"), planned(tmp_path, "whole")
    seconds = [plan.predicted.seconds_per_minibatch for plan in (auto, whole)]
    assert seconds[0] < 0.9 * seconds[1]
    again = [stage for stage in auto.stages if stage.recomputed_nodes]
    assert again
    assert all(stage.mesh == (2,) for stage in auto.stages)
    assert all(0 < len(stage.recomputed_nodes) < len(stage.nodes) for stage in again)
    assert all(stage.memory_bytes <= MEMORY for stage in auto.stages)
