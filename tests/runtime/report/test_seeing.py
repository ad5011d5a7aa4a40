"""A whole run as its user sees it: the trace, what was printed, TensorBoard."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_models
import torch
from commands import Done, typed
from plans import cut, make_plan

from pipedream.capture.export import capture
from pipedream.graph.plan import write_plan
from pipedream.runtime.report.recording import read_trace
from pipedream.runtime.run import job

SUPPORT = Path(small_models.__file__).parent
CONFIG = """\
format: pipedream-run/1
model: {source: "small_models:Noisy"}
data: {source: "small_models:classes"}
sampler: {source: "torch.utils.data:RandomSampler"}
optimizer: {name: SGD, args: {lr: 0.25}, groups: [{match: ["*.bias"], args: {lr: 0.5}}]}
batch_size: 4
epochs: 2
"""
MINIBATCHES = 15


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A run on stages of two replicas and one, its folder and how it ended."""
    folder = tmp_path_factory.mktemp("seeing")
    graph = capture(small_models.Noisy(), (torch.randn(4, 6),)).graph
    write_plan(make_plan(graph, cut(graph, 2), (2, 1)), folder / "plan.json")
    (folder / "run.yaml").write_text(CONFIG)
    words = ["pd-train", "plan.json", "--config", "run.yaml", "-o", "run", "--trace"]
    if find_spec("tensorboard"):
        words.append("--tensorboard")
    done = typed(folder, words, {"PYTHONPATH": str(SUPPORT)}, seconds=100)
    assert done.code == 0, done.error
    return folder / "run", done


@pytest.mark.thorough
@pytest.mark.slow
def test_the_trace_has_every_action_of_every_epoch(run):
    folder, _ = run
    found = json.loads((folder / "trace.json").read_text())["traceEvents"]
    passes = Counter(e["name"] for e in found if e["ph"] == "X" and "B" in e["name"])
    assert sum(passes.values()) == 2 * 2 * MINIBATCHES
    first = [e["name"] for e in found if e["ph"] == "X" and e["name"].startswith("1F0")]
    assert len(first) == 2
    assert [e["name"] for e in found if e["ph"] == "i"] == ["epoch 1", "epoch 2"]
    counted = {e["name"] for e in found if e["ph"] == "C"}
    assert counted == {"minibatches in flight", "weight versions"}
    held = [e["args"]["weight versions"] for e in found if e["name"] == "weight versions"]
    assert max(held) == 2


@pytest.mark.slow
def test_nothing_is_received_before_it_was_sent(run):
    """On one clock, however the ranks' own differ."""
    folder, _ = run
    ranks = read_trace(folder / "timeline.csv")
    report = json.loads((folder / "summary.json").read_text())
    slack = 2 * max(rank["clock_error_seconds"] for rank in report["ranks"])
    sent = {e.action.minibatch: e for r in (0, 1) for e in ranks[r] if e.action.kind == "SA"}
    received = {e.action.minibatch: e for e in ranks[2] if e.action.kind == "RA"}
    assert sent.keys() == received.keys() == set(range(MINIBATCHES))
    for minibatch, event in received.items():
        assert sent[minibatch].begin <= event.end + slack


@pytest.mark.slow
def test_what_each_rank_did_is_printed_and_kept(run):
    folder, done = run
    rows = [line.split() for line in done.out.splitlines()]
    assert [row[:3] for row in rows if len(row) == 12 and row[0].isdigit()] == [
        ["0", "0", "0"],
        ["1", "0", "1"],
        ["2", "1", "0"],
    ]
    bubble = re.search(r"^bubble +([\d.]+)%$", done.out, re.MULTILINE)  # nothing was promised
    assert bubble is not None
    report = json.loads((folder / "summary.json").read_text())
    assert report["bubble"] == pytest.approx(float(bubble[1]) / 100, abs=0.001)
    assert all(0 < rank["busy"] < 1 for rank in report["ranks"])
    assert "trace.json" in done.out


@pytest.mark.slow
def test_tensorboard_has_what_was_told(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = run
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = board.Scalars("loss")
    assert [event.step for event in found] == list(range(2 * MINIBATCHES))
    assert [e.value for e in found] == pytest.approx([t["loss"] for t in told], rel=1e-6)
    for group, rate in enumerate([0.5, 0.25]):
        assert {e.value for e in board.Scalars(f"learning rate/group {group}")} == {rate}
    for rank in range(3):
        assert board.Scalars(f"memory in bytes/rank {rank}")[-1].value > 0
        assert 0 <= board.Scalars(f"busy share/rank {rank}")[-1].value <= 1


def test_without_tensorboard_it_says_so(monkeypatch):
    monkeypatch.setattr(job, "find_spec", lambda name: None)
    asked = job.Job.__new__(job.Job)
    object.__setattr__(asked, "config", SimpleNamespace(metrics=()))
    object.__setattr__(asked, "tensorboard", True)
    with pytest.raises(job.UserError, match=r"metrics tensorboard: .* pip install tensorboard"):
        asked.check_metrics()
