"""Compiled whole passes compute again what they did not save; passes that are programs saved it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import typed

from pipedream.graph.plan import read_plan


def planned(folder: Path, perceptron: Path, halved: bool, *words: str) -> float:
    """The memory of all stages, where compiled passes save half of it, or where they are
    not compiled.
    """
    own = folder / f"{halved}"
    shutil.copytree(perceptron, own)
    profile = json.loads((own / "profile.json").read_text())
    for node in profile["nodes"]:
        if halved:
            node["program_saved_bytes"] = node["saved_bytes"]
            node["saved_bytes"] //= 2
    (own / "profile.json").write_text(json.dumps(profile))
    told = ["pd-optimize", str(own), "--machines", "2", "--bandwidth", "1GB", "-o", "plan"]
    done = typed(folder, [*told, "--schedule", "flush", "--microbatches", "8", *words])
    assert done.code == 0, done.error
    shutil.rmtree(own)
    return sum(stage.memory_bytes for stage in read_plan(folder / "plan" / "plan.json").stages)


@pytest.mark.parametrize(
    ("words", "is_smaller"),
    [
        (["--straight"], True),
        (["--straight", "--order", "interleaved", "--stages-per-rank", "2"], True),
        (["--straight", "--order", "zb-h1"], False),
        (["--mesh", "2"], False),
    ],
)
def test_programs_keep_what_they_do_eagerly(
    tmp_path: Path, perceptron: Path, words: list[str], is_smaller: bool
) -> None:
    eager, halved = (planned(tmp_path, perceptron, each, *words) for each in (False, True))
    assert halved < eager if is_smaller else halved == eager
