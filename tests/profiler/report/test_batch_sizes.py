from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import but_progress
from profiled import layer, profile

from pipedream.graph.errors import UserError
from pipedream.graph.model import read_graph
from pipedream.graph.profile import DirectionFit, Profile, read_profile
from pipedream.profiler.cli import main
from pipedream.profiler.report.batch_sizes import (
    batch_sizes_frame,
    batch_sizes_table,
    draw_batch_sizes,
    parse_batch_sizes,
)

Run = Callable[..., tuple[int, str, str]]

USER = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

def told(batch_size):
    return net(), torch.ones(batch_size, 3)

def deaf():
    return net(), torch.ones(4, 3)

def shifting(batch_size):
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU() if batch_size < 4 else nn.Tanh())

def normed():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

def data():
    return [(torch.zeros(3), 0)] * 8, None
"""
CONFIG = """
format: pipedream-run/1
model: {source: "users_net:net"}
data: {source: "users_net:data"}
batch_size: 6
"""
QUICK = ("--repeats", "1", "--warmup", "1")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """pd-profile in a folder that has the user's module: exit code, stdout, stderr."""
    (tmp_path / "users_net.py").write_text(USER)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_net", raising=False)
    threads = torch.get_num_threads()

    def call(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main.main([*args, *QUICK], prog_name="pd-profile")
        torch.set_num_threads(threads)
        printed = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, printed.out, but_progress(printed.err)

    return call


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [("run.yaml",), ("users_net:told",), ("users_net:net", "--input", "3")]
)
def test_a_profile_for_each_size_and_how_they_compare(
    run: Run, tmp_path: Path, model: tuple[str, ...]
) -> None:
    code, out, err = run(*model, "--batch-sizes", "4,1,2", "-o", "out")
    assert (code, err) == (0, ""), err
    fingerprints = set()
    for size in (1, 2, 4):
        folder = tmp_path / "out" / f"batch-{size}"
        found, graph = read_profile(folder / "profile.json"), read_graph(folder / "graph.txt")
        assert found.batch_size == size
        assert found.nodes[0].outputs[0].shape == (size, 3)
        assert found.graph_fingerprint == graph.fingerprint
        fingerprints.add(graph.fingerprint)
        assert (folder / "layers.csv").exists()
        assert (folder / "layers.png").exists()
    assert len(fingerprints) == 1
    with (tmp_path / "out/batch_sizes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["batch_size"]) for row in rows] == [1, 2, 4]
    saved = [float(row["saved_bytes"]) for row in rows]
    assert saved == pytest.approx([saved[0], 2 * saved[0], 4 * saved[0]])
    assert (tmp_path / "out/batch_sizes.png").read_bytes().startswith(b"\x89PNG")
    assert "Written: out/batch-1/graph.txt, profile.json, operators.json, layers.csv" in out
    assert "speed-up" in out
    assert "Next: pd-optimize out --machines 2" in out


def at(size: int, forward: float, backward: float, **more: object) -> Profile:
    """Two layers, which take these milliseconds each."""
    nodes = (layer(name, forward=forward, backward=backward, **more) for name in "ab")
    return profile(*nodes, batch_size=size)


def test_the_numbers_of_each_size() -> None:
    call = DirectionFit(call_seconds=1e-3, factor=1.0, typical_error=0.0, worst_error=0.0)
    called = at(4, 2, 4, saved_bytes=200).model_copy(update={"forward": call})
    frame = batch_sizes_frame([at(2, 1, 3), called])
    assert list(frame["batch_size"]) == [2, 4]
    assert list(frame["forward_seconds"]) == pytest.approx([2e-3, 5e-3])
    assert list(frame["backward_seconds"]) == pytest.approx([6e-3, 8e-3])
    assert list(frame["forward_seconds_per_example"]) == pytest.approx([1e-3, 1.25e-3])
    assert list(frame["seconds_per_example"]) == pytest.approx([4e-3, 3.25e-3])
    assert list(frame["examples_per_second"]) == pytest.approx([250, 4000 / 13])
    assert list(frame["speedup"]) == pytest.approx([1, 16 / 13])
    assert list(frame["saved_bytes"]) == [100, 400]
    assert list(frame["saved_bytes_per_example"]) == [50, 100]


def test_what_older_profiles_do_not_know_is_left_out(tmp_path: Path) -> None:
    frame = batch_sizes_frame([at(1, 1, 3, saved_bytes=None), at(2, 1, 3)])
    assert frame["saved_bytes"].isna().tolist() == [True, False]
    table = batch_sizes_table(frame, "x")
    assert list(table.columns[5].cells) == ["-", "100 B"]
    draw_batch_sizes(frame, "$x", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_list_of_sizes() -> None:
    assert parse_batch_sizes("8,1, 2") == [1, 2, 8]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("4", "nothing to compare: give two"),
        ("", "give whole numbers"),
        ("1,two", "give whole numbers"),
        ("1,2.5", "give whole numbers"),
        ("0,1", "0 is not a batch size"),
        ("-2,1", "-2 is not a batch size"),
        ("1,4,1", "1 is given twice"),
    ],
)
def test_a_list_that_is_none(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        parse_batch_sizes(text)
    assert error.value.message.startswith(f"--batch-sizes {text}: ")


WRONG = {
    "both": (("users_net:told", "--batch-size", "4"), "both set the number of examples"),
    "another structure": (
        ("users_net:shifting", "--input", "3"),
        "--batch-sizes: the model has another structure at batch size 4: node3 is ReLU() at 2 and"
        " Tanh() at 4",
    ),
    "inputs that stay": (("users_net:deaf",), "users_net:deaf returns inputs of the same shape"),
    "a size that cannot be": (
        ("users_net:normed", "--input", "3", "--batch-sizes", "1,2"),
        "at batch size 1: ",
    ),
    "too few data": (("run.yaml", "--batch-sizes", "4,9"), "at batch size 9: users_net:data: 8"),
    "sizes from before": (("users_net:told", "-o", "used"), "batch-16 is from an earlier run"),
    "network": (("--network",), "--batch-sizes does not go with --network"),
    "show": (("--show", "used"), "leave --batch-sizes out"),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("wrong", WRONG)
def test_every_mistake_is_one_line_and_exit_code_2(run: Run, tmp_path: Path, wrong: str) -> None:
    (tmp_path / "used/batch-16").mkdir(parents=True)
    (tmp_path / "used/batch-16/graph.txt").write_text("")
    words, told = WRONG[wrong]
    where = () if wrong == "show" else ("-o", "out")
    code, _, err = run("--batch-sizes", "2,4", *where, *words)
    assert code == 2
    assert err.startswith("pd-profile: ")
    assert told in err
    assert err.count("\n") == 1
