"""What README's commands do, from Python."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import small_models
import torch
from profiled import profile_of
from torch.nn import functional as F

import pipedream
from pipedream.command_line import words
from pipedream.graph.model import format_graph, read_graph
from pipedream.graph.profile import write_profile
from pipedream.training import Run, _follow


def test_importing_it_takes_no_torch() -> None:
    code = "import sys, pipedream; print('torch' in sys.modules, *dir(pipedream))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", *sorted(pipedream.__all__)]
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        pipedream.optimise  # noqa: B018


def test_keywords_are_options() -> None:
    asked = {"save_every": 4, "trace": True, "keep": None, "machines": (4, 2), "resume": False}
    assert list(words(asked)) == ["--save-every", "4", "--trace", "--machines", "4,2"]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: pipedream.profile(lambda: torch.nn.Linear(4, 4), X),  # type: ignore[arg-type]
            "model: this is a function, not a torch.nn.Module: call it",
        ),
        (lambda: pipedream.profile(LINEAR), r"profile: missing .*'inputs': write profile\(model, "),
        (lambda: pipedream.profile(LINEAR, X, 3), r"profile: too many positional arguments"),
        (
            lambda: pipedream.profile(LINEAR, X, repeat=3),
            "there is no repeat=; did you mean repeats=",
        ),
        (
            lambda: pipedream.optimize(GRAPH, machines=2, bandwidth="1GB", sheduled="flush"),
            r"optimize: there is no sheduled=; did you mean schedule=\?",
        ),
        (
            lambda: pipedream.train("plan.json", "run.yaml", "run", epoch=3),
            r"train: there is no epoch=; did you mean epochs=\?",
        ),
        (lambda: pipedream.train("plan.json", "run.yaml"), "train: missing .*'output'"),
    ],
)
def test_arguments_that_there_are_not(call: Callable[[], object], told: str) -> None:
    """They ended in TypeErrors, and those of train in the usage of pd-train."""
    with pytest.raises(pipedream.UserError, match=told) as caught:
        call()
    assert "\n" not in caught.value.message


X, LINEAR = torch.randn(2, 4), torch.nn.Linear(4, 4)
GRAPH = Path(__file__).parent / "optimizer" / "translation.txt"


def test_stages_of_the_users_own_are_priced() -> None:
    planned = pipedream.optimize(GRAPH, machines=3, bandwidth="1GB/s", split="enc", replicas=(2, 1))
    assert planned.plan.replicas == (2, 1)
    assert "The stages of --split; at most" in planned.report


def test_a_graph_in_memory_is_planned_as_its_file_is_and_needs_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    asked = {"machines": 2, "bandwidth": "1GB/s"}
    of_file, of_graph = (pipedream.optimize(each, **asked) for each in (GRAPH, read_graph(GRAPH)))
    assert of_graph.report == of_file.report
    assert of_graph.files == of_file.files
    assert of_graph.plan == of_file.plan


def test_a_plan_names_the_profile_by_a_path_that_holds_in_any_folder(tmp_path: Path) -> None:
    """It was relative to a temporary folder."""
    graph = read_graph(GRAPH)
    (tmp_path / "graph.txt").write_text(format_graph(graph))
    write_profile(profile_of(graph), tmp_path / "profile.json")
    planned = pipedream.optimize(tmp_path / "graph.txt", 2, "1GB/s", export=["torch"])
    assert planned.plan.asked is not None
    assert planned.plan.asked.profile == str(tmp_path / "profile.json")
    assert json.loads(planned.files["export-torch.json"])["stages"]


def test_a_plan_is_shown_whole_and_by_no_folder_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a notebook the report was displayed past `report`, and named a temporary folder."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    planned = pipedream.optimize(GRAPH, machines=2, bandwidth="1GB/s")
    assert "expected in a run" in planned.report
    assert "The fastest plan found under each schedule" in planned.report
    for gone in ("Written:", "Next:", "/tmp", "\x1b"):
        assert gone not in planned.report
    assert str(planned) == planned.report
    shown = repr(planned)
    assert "2 of 2 devices, weight-stashing: " in shown
    assert len(shown) < 120


def test_a_run_is_shown_with_a_table_of_its_ranks(tmp_path: Path) -> None:
    """They stood in one cell, as a list of dictionaries."""
    ranks = [{"rank": rank, "stage": rank, "busy": 0.5} for rank in range(2)]
    summary = {"schedule": "flush", "final_loss": 0.123456789, "ranks": ranks}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    shown = Run(tmp_path)._repr_html_()
    assert "<th>stage</th>" in shown
    assert "<td>0.1235</td>" in shown
    assert "{" not in shown


def _script(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "script.py").write_text(text)
    return [sys.executable, "-u", str(tmp_path / "script.py")]


def test_training_prints_what_pd_train_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was to be seen until the end of the run; and no live table is, in a notebook."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = """
from rich.console import Console
assert not Console(stderr=True).is_terminal
print('epoch 1')
raise SystemExit('pd-train: no')
"""
    code, lines = _follow(_script(tmp_path, text))
    assert (code, list(lines)) == (1, ["epoch 1", "pd-train: no"])
    assert capsys.readouterr().out == "epoch 1\npd-train: no\n"


@pytest.mark.thorough
@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupted_run_has_the_time_to_save(tmp_path: Path, interrupts: int) -> None:
    """It was killed after a quarter of a second, without a checkpoint; now by a second one."""
    train = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: None)
print("training")
deadline = time.monotonic() + 1 + 60 * (sys.argv[1] == "2")
while time.monotonic() < deadline: time.sleep(0.05)
print("saved")
sys.exit(130)
"""
    command = [*_script(tmp_path, train), str(interrupts)]
    # What a shell starts in the background, such as a run of all tests, ignores interrupts.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heard}; from pipedream.training import _follow; print(_follow({command})[0])"
    asked = [sys.executable, "-u", "-c", code]
    pipe, problem = subprocess.PIPE, tmp_path / "problem"
    with (
        problem.open("w") as error,
        subprocess.Popen(asked, stdout=pipe, stderr=error, text=True, process_group=0) as running,
    ):
        assert running.stdout is not None
        assert running.stdout.readline() == "training\n"
        os.killpg(running.pid, signal.SIGINT)
        deadline = time.monotonic() + 40
        # Two that come before a busy machine has seen to the first one count as one.
        while interrupts == 2 and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            os.killpg(running.pid, signal.SIGINT)
        try:
            said, _ = running.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            pytest.fail(f"training goes on without whom to tell: {problem.read_text()}")
    assert ("saved\n130" in said) == (interrupts == 1)
    assert ("KeyboardInterrupt" in problem.read_text()) == (interrupts == 2)


@pytest.mark.thorough
@pytest.mark.slow
def test_from_a_model_to_a_trained_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(small_models.__file__).parent))
    threads, collector = torch.get_num_threads(), gc.get_threshold()
    profiled = pipedream.profile(
        small_models.Noisy(),
        torch.randn(4, 6),
        loss=lambda output: F.cross_entropy(output, torch.zeros(4, dtype=torch.long)),
        repeats=3,
        warmup=1,
    )
    assert profiled.layers["op"].tolist()[-1] == "Linear"
    assert "Linear" in profiled._repr_html_()
    assert re.search(r"<td>[\d.]+ (us|ms)</td>", profiled._repr_html_())
    assert re.fullmatch(r"<small_models:Noisy, batch 4: \d+ nodes, forward .*>", repr(profiled))
    planned = pipedream.optimize(profiled, machines=2, bandwidth="1GB/s", straight=True)
    assert planned.plan.replicas == (1, 1)
    assert planned.plan.batch_size == 4
    assert "stage" in planned.report
    assert ("<svg" in planned._repr_html_()) == (shutil.which("dot") is not None)
    assert (planned.write("plan") / "plan.json").exists()
    config = {
        "format": "pipedream-run/1",
        "model": {"source": "small_models:Noisy"},
        "data": {"source": "small_models:classes"},
        "batch_size": 4,
    }
    run = pipedream.train(planned, config, "run", epochs=2, save_every=8)
    assert len(run.metrics) == 30
    assert run.summary["final_loss"] == pytest.approx(run.metrics["loss"].iloc[-1])
    assert "final_loss" in run._repr_html_()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan", "run"]
    assert (torch.get_num_threads(), gc.get_threshold()) == (threads, collector)
    tried = pipedream.evaluate(planned, config, "run")
    assert tried["held_out_loss"] == pytest.approx(run.summary["held_out_loss"])
    with pytest.raises(pipedream.UserError, match="-o run: there are checkpoints"):
        pipedream.train(planned, config, "run")
    with pytest.raises(pipedream.UserError, match="--bandwidth"):
        pipedream.optimize(profiled, machines=2, bandwidth="10")
