"""Whole runs by the command: under each launcher, stopped and resumed, several on one machine."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_models
import torch
from commands import interrupt, start, typed
from listening import descendants, is_loopback, listening
from plans import cut, make_plan
from safetensors.torch import load_file
from training import losses, run_jobs, weights

from pipedream.capture.export import capture
from pipedream.graph.errors import UserError
from pipedream.graph.plan import read_plan, write_plan
from pipedream.graph.run_config import read_config
from pipedream.runtime import trainer
from pipedream.runtime.report.metrics.writers import Writers
from pipedream.runtime.run.job import Job
from pipedream.runtime.run.training_segment import Position

BIN = Path(sys.executable).parent
SUPPORT = Path(small_models.__file__).parent
CHAIN = """\
format: pipedream-run/1
model: {source: "small_models:Chain"}
data: {source: "small_models:regression"}
loss: mse_loss
optimizer: {name: AdamW, args: {lr: 0.05}}
batch_size: 4
dtype: float64
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(SUPPORT),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=110
    )


VARIABLES = {"PYTHONPATH": str(SUPPORT)}
TRAIN = ("pd-train", "plan.json", "--config", "run.yaml")
LAUNCHERS = {
    "alone": (),
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node=2", "--no-python"),
    "mpirun": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"),
}


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("alone", marks=pytest.mark.thorough),
        pytest.param("torchrun", marks=pytest.mark.slow),
        pytest.param("mpirun", marks=pytest.mark.thorough),
    ],
)
def test_each_launcher_trains_the_plan(launcher: str, folder: Path) -> None:
    done = run(folder, *LAUNCHERS[launcher], *TRAIN, "-o", "run")
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["held_out_accuracy"] > 0.5
    assert [rank["stage"] for rank in summary["ranks"]] == [0, 1]
    assert all(rank["peak_memory_bytes"] > 0 for rank in summary["ranks"])
    assert [rank["weight_versions"] for rank in summary["ranks"]] == [2, 1]
    metrics = (folder / "run/metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 3 * summary["minibatches_per_epoch"]
    assert summary["final_loss"] == json.loads(metrics[-1])["loss"]
    assert "Written: run/summary.json" in done.stdout
    assert (folder / "run/timeline.png").stat().st_size > 1000


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_on_one_machine_listens_on_the_loopback_alone(folder: Path) -> None:
    process = start(folder, TRAIN, VARIABLES)
    addresses: set[str] = set()
    while process.poll() is None:
        addresses |= listening(descendants(process.pid))
        time.sleep(0.05)
    assert process.returncode == 0
    assert addresses
    assert all(map(is_loopback, addresses)), addresses


@pytest.mark.thorough
@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_was_never_stopped(folder: Path) -> None:
    """Dropout, momentum and the order of the data go on as if nothing had happened."""
    plan, config = read_plan(folder / "plan.json"), read_config(folder / "run.yaml")
    whole = Job(plan, config, SUPPORT, folder / "whole", epochs=3, evaluate=False)
    first = replace(whole, run=folder / "parts", epochs=1)
    run_jobs([whole, first, replace(first, epochs=3, resume=True)])
    expected, found = weights(whole), weights(first)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert losses(first) == losses(whole)


@pytest.mark.thorough
@pytest.mark.slow
def test_what_was_missing_when_all_were_killed_at_the_end_is_made_up_for(folder: Path) -> None:
    """With the last checkpoint written and no summary, --resume said that all epochs were done:
    there never was a summary, a held-out result or an export.
    """
    plan, config = read_plan(folder / "plan.json"), read_config(folder / "run.yaml")
    whole = Job(plan, config, SUPPORT, folder / "whole", epochs=2)
    again = replace(whole, resume=True)
    run_jobs([whole])
    first, trained = json.loads((whole.run / "summary.json").read_text()), weights(whole)
    for broken in (None, "{", '{"epochs": 1}', "[]", '{"epochs": []}'):
        (whole.run / "summary.json").unlink()
        if broken is not None:
            (whole.run / "summary.json").write_text(broken)
        run_jobs([again])
        found = json.loads((whole.run / "summary.json").read_text())
        for key in ("epochs", "final_loss", "held_out_loss", "held_out_accuracy"):
            assert found[key] == first[key]
    export = replace(again, export=folder / "model.safetensors")
    run_jobs([export])
    for name, tensor in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(tensor, trained[name], rtol=0, atol=0)
    assert export.is_finished
    assert not replace(export, epochs=3).is_finished


@pytest.mark.thorough
@pytest.mark.slow
def test_going_on_inside_an_epoch_is_the_run_that_was_never_stopped(folder: Path) -> None:
    """Replicas, a segment that is rounded up to whole updates, and losses told of later
    minibatches.

    63 examples: the last minibatch has three.
    """
    graph = capture(small_models.Noisy(), (torch.randn(4, 6),)).graph
    classes = '{source: "small_models:classes", args: {examples: 84}}'
    (folder / "run.yaml").write_text(
        (folder / "run.yaml").read_text().replace('{source: "small_models:classes"}', classes)
    )
    plan, config = make_plan(graph, cut(graph, 2), (2, 1)), read_config(folder / "run.yaml")
    whole = Job(plan, config, SUPPORT, folder / "whole", epochs=2, evaluate=False, save_every=3)
    run_jobs([whole])
    saved = sorted(path.name for path in whole.checkpoints.glob("epoch-*"))
    assert saved == [
        *["epoch-0000-000004", "epoch-0000-000008", "epoch-0000-000012", "epoch-0001"],
        *["epoch-0001-000004", "epoch-0001-000008", "epoch-0001-000012", "epoch-0002"],
    ]
    parts = replace(whole, run=folder / "parts", resume=True, keep=2)
    shutil.copytree(whole.run, parts.run, symlinks=True)
    for name in saved[5:]:
        shutil.rmtree(parts.checkpoints / name)
    with (parts.run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "minib')
    run_jobs([parts])
    assert losses(parts) == losses(whole)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], tensor, rtol=0, atol=0)
    assert sorted(path.name for path in parts.checkpoints.iterdir()) == [*saved[6:], "latest"]


def test_a_run_that_fails_leaves_nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python could not take down its modules, and triton told of its leaks after the error."""

    def fail(context: object) -> None:
        raise UserError("the user's mistake")

    monkeypatch.setattr(trainer, "train_epochs", fail)
    before = gc.get_freeze_count()
    job = SimpleNamespace(evaluate_only=False)
    local = SimpleNamespace(rank_info=SimpleNamespace(rank=1), job=job)
    context: Any = SimpleNamespace(display=None, local=local, writers=Writers({}), retuner=None)
    with pytest.raises(UserError):
        trainer._run(context)
    assert gc.get_freeze_count() <= before


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["alone", "torchrun"])
def test_a_run_goes_on_when_a_worker_was_killed(launcher: str, folder: Path) -> None:
    """From the newest checkpoint; the end is that of a run in which nothing happened."""
    plan, config = read_plan(folder / "plan.json"), read_config(folder / "run.yaml")
    whole = Job(plan, config, SUPPORT, folder / "whole", epochs=3, evaluate=False, save_every=4)
    run_jobs([whole])
    (folder / "deadly.yaml").write_text(
        (folder / "run.yaml").read_text().replace("classes", "deadly")
    )
    words = ["pd-train", "plan.json", "--config", "deadly.yaml", "-o", "run", "--save-every", "4"]
    if launcher == "alone":
        done = typed(folder, [*words, "--max-restarts", "1"], VARIABLES)
        line = (
            r"pd-train: rank 1 was killed by SIGKILL in epoch 2 at 1\S+, minibatch \d+; restart 1"
        )
        (said,) = (line for line in done.error.splitlines() if line.startswith("pd-train: "))
        assert re.match(line, said)
        assert done.code == 0, done.error
    else:
        torchrun = [*LAUNCHERS["torchrun"][:-1], "--max-restarts=1", "--no-python"]
        program = run(folder, *torchrun, *words)
        assert program.returncode == 0, program.stderr
    killed = replace(whole, run=folder / "run")
    assert losses(killed) == losses(whole)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(killed)[name], tensor, rtol=0, atol=0)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_run_goes_on(folder: Path) -> None:
    """Once is enough: it drains, saves and leaves with 130."""
    plan, config = read_plan(folder / "plan.json"), read_config(folder / "run.yaml")
    job = Job(plan, config, SUPPORT, folder / "run")
    words = [*TRAIN, "-o", "run", "--save-every", "4", "--keep", "2", "--epochs", "400"]
    process = start(folder, words, {"PYTHONPATH": str(SUPPORT)})
    error = interrupt(process, folder / "run")
    assert process.returncode == 130, error
    *_, line = error.splitlines()
    stopped = job.saved
    assert line == f"pd-train: saved run/checkpoints/{stopped}; go on with --resume"
    assert stopped is not None
    assert len(losses(job)) == 15 * stopped.epoch + stopped.minibatch
    words = [*TRAIN, "-o", "run", "--resume", "--epochs", str(stopped.epoch + 1)]
    again = typed(folder, words, VARIABLES)
    assert again.code == 0, again.error


@pytest.mark.thorough
@pytest.mark.slow
def test_legs_change_nothing_for_flush(tmp_path: Path) -> None:
    """It drains after every update as it is."""
    graph = capture(small_models.Chain(), (torch.randn(4, 6),)).graph
    (tmp_path / "run.yaml").write_text(CHAIN)
    config = read_config(tmp_path / "run.yaml")
    plan = make_plan(graph, cut(graph, 2), (1, 1), "flush")
    whole = Job(plan, config, SUPPORT, tmp_path / "whole", schedule="flush", evaluate=False)
    training_segments = replace(whole, run=tmp_path / "segments", save_every=5)
    run_jobs([whole, training_segments])
    assert (training_segments.checkpoints / "epoch-0000-000008").exists()
    assert losses(training_segments) == losses(whole)


@pytest.mark.slow
def test_a_run_is_exported_for_the_plain_model(folder: Path) -> None:
    """Right after training, or later; a tied weight under both of its names."""
    model = small_models.Tied()
    graph = capture(model, (torch.randn(4, 6),)).graph
    text = (
        (folder / "run.yaml").read_text().replace("Noisy", "Tied").replace("classes", "regression")
    )
    (folder / "run.yaml").write_text(text + "loss: mse_loss\n")
    config = read_config(folder / "run.yaml")
    plan = make_plan(graph, cut(graph, 2), (1, 1), "flush")
    write_plan(plan, folder / "plan.json")
    target = folder / "model.safetensors"
    run_jobs(
        [Job(plan, config, SUPPORT, folder / "run", schedule="flush", epochs=3, export=target)]
    )
    state = load_file(target)
    model.load_state_dict(state)
    assert {"a.linear.weight", "c.linear.weight"} <= state.keys()
    words = [*TRAIN, "-o", "run", "--resume", "--export", "again.safetensors"]
    done = typed(folder, words, VARIABLES)
    assert (done.code, done.out) == (0, "Written: again.safetensors\n"), done.error
    assert (folder / "again.safetensors").read_bytes() == target.read_bytes()


@pytest.mark.slow
def test_a_checkpoint_loads_into_the_plain_model(folder: Path) -> None:
    plan, config = read_plan(folder / "plan.json"), read_config(folder / "run.yaml")
    job = Job(plan, config, SUPPORT, folder / "run", evaluate=False)
    run_jobs([job])
    small_models.Noisy().load_state_dict(weights(job))


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    """Checkpoints know parameters, not stages: with flush the losses are those of one plan."""
    graph = capture(small_models.Chain(), (torch.randn(4, 6),)).graph
    (tmp_path / "run.yaml").write_text(CHAIN)
    config = read_config(tmp_path / "run.yaml")
    two = make_plan(graph, cut(graph, 2), (1, 1), "flush")
    three = make_plan(graph, cut(graph, 3), (1, 2, 1), "flush")
    whole = Job(two, config, SUPPORT, tmp_path / "whole", schedule="flush", epochs=2)
    first = replace(whole, run=tmp_path / "parts", epochs=1, save_every=4)
    run_jobs([whole, first])
    shutil.rmtree(first.checkpoints / "epoch-0001")  # it goes on inside the first epoch
    assert first.saved == Position(0, 12)
    run_jobs([replace(first, plan=three, epochs=2, resume=True)])
    assert losses(first) == pytest.approx(losses(whole), rel=1e-12)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(first)[name], tensor, rtol=1e-12, atol=1e-12)
