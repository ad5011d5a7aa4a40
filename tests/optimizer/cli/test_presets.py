"""Clusters by name, and the examples of an update where there is one profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node, format_graph
from pipedream.optimizer.cli.asked.updates import with_global_batch
from pipedream.optimizer.cli.cluster_options import cluster_of
from pipedream.optimizer.cli.options import ModelInMemory, Options
from pipedream.optimizer.cli.presets import MACHINES, preset

GRAPH = Graph({"a": Node("a", "Linear", 1.0, 2.0, (8.0,), 4.0)}, ())


def options(**changes: Any) -> Options:
    return Options(**({"graph": ModelInMemory(GRAPH)} | changes))


@pytest.mark.parametrize("name", MACHINES)
def test_a_name_and_a_number_are_so_many_machines_of_eight(name: str) -> None:
    cluster = preset(f"{name}:4")
    assert cluster is not None
    assert cluster.machines == (8, 4)
    assert cluster.device(0).memory == MACHINES[name].memory
    inside, outside = cluster.bandwidth
    assert inside < MACHINES[name].inside
    assert outside < MACHINES[name].outside


def test_one_machine_has_one_level() -> None:
    assert cluster_of(options(cluster=Path("dgx-h100:1"))).machines == (8,)


def test_an_unknown_machine_is_told_with_the_likely_one() -> None:
    with pytest.raises(UserError, match="name dgx-h100"):
        preset("dgx-h10:2")
    assert preset("cluster.yaml") is None


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    level = "{name: device, count: 2, bandwidth: 1GB/s}"
    Path("dgx-h100:4").write_text(f"format: pipedream-cluster/1\nlevels: [{level}]\n")
    assert cluster_of(options(cluster=Path("dgx-h100:4"))).machines == (2,)


def test_a_global_batch_without_a_profile_or_with_another_number_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "graph.txt").write_text(format_graph(GRAPH))
    asked = options(graph=tmp_path / "graph.txt", schedule="flush", global_batch=64)
    with pytest.raises(UserError, match=r"batch size of .* is not known"):
        with_global_batch(asked)
    both = options(
        schedule="flush", global_batch=64, microbatches=2, typed=frozenset({"microbatches"})
    )
    with pytest.raises(UserError, match="both set the examples per update"):
        with_global_batch(both)
