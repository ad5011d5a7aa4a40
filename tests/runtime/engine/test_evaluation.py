"""Held-out data through the pipeline are what the plain model makes of them."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import small_models
import torch
from plans import cut, make_plan
from training import run_jobs

from pipedream.capture.export import capture
from pipedream.capture.loss import load_loss, load_metrics
from pipedream.capture.sources.load import load_config_model
from pipedream.graph.run_config import DataFactory, Factory, OptimizerConfig, RunConfig
from pipedream.runtime.checkpoint.files import load_all
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.engine.evaluation import EvaluationTotals, obstacle
from pipedream.runtime.held_out import evaluate
from pipedream.runtime.report.live_table import keep_until
from pipedream.runtime.run.job import Job
from pipedream.schedule.schedule import forwards

SUPPORT = Path(small_models.__file__).parent


def config(model: str, data: str, loss: str = "cross_entropy", **args: int) -> RunConfig:
    return RunConfig(
        format="pipedream-run/1",
        model=Factory(source=f"small_models:{model}"),
        data=DataFactory(source=f"small_models:{data}", args=args),
        loss=loss,
        optimizer=OptimizerConfig(name="SGD", args={"lr": 0.1, "momentum": 0.9}),
        batch_size=4,
        evaluate_every=2,
    )


def tried(job: Job) -> list[dict[str, float]]:
    return [json.loads(line) for line in (job.run / "held_out.jsonl").read_text().splitlines()]


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "autocast"), [((1, 1, 1), None), ((2, 1, 2), "bfloat16")])
def test_it_is_what_the_plain_model_does(
    tmp_path: Path, replicas: tuple[int, ...], autocast: str | None
) -> None:
    """Dropout and batch norm in eval mode; 21 examples are five minibatches and one more."""
    own = {"autocast": autocast, "held_out_metrics": {"margin": "small_models:margin"}}
    chosen = config("Noisy", "classes", examples=84).model_copy(update=own)
    assert_as_plain(chosen, replicas, (torch.randn(4, 6),), tmp_path / "run")


@pytest.mark.thorough
@pytest.mark.slow
def test_it_is_what_a_model_finds_that_returns_its_own_loss(tmp_path: Path) -> None:
    """A mean over all examples, of which the last minibatch has one."""
    inputs = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)
    chosen = config("Judging", "classes", loss="output", examples=84)
    assert_as_plain(chosen, (1, 1, 1), inputs, tmp_path / "run")


def assert_as_plain(
    chosen: RunConfig, replicas: tuple[int, ...], inputs: tuple[torch.Tensor, ...], run: Path
) -> None:
    """A run tries 21 held-out examples after two epochs and three, as one worker would."""
    model = getattr(small_models, chosen.model.source.partition(":")[2])
    graph = capture(model(), inputs).graph
    plan = make_plan(graph, cut(graph, 3), replicas)
    job = Job(plan, chosen, SUPPORT, run, epochs=3)
    older = job.checkpoints / "epoch-0002"
    again = replace(job, evaluate_only=True)
    run_jobs([job, again, replace(again, run=run.with_name("again"), checkpoint=older)])
    assert_told_again(job, tried(job)[-1], "epoch-0003")
    assert_told_again(replace(job, run=run.with_name("again")), tried(job)[0], "epoch-0002")
    assert [found["epoch"] for found in tried(job)] == [2, 3]
    _, held_out = small_models.classes(84)
    for found in tried(job):
        path = job.checkpoints / f"epoch-{found['epoch']:04}"
        assert load_all(path)
        plain = evaluate(
            load_config_model(chosen, SUPPORT),
            path,
            held_out,
            chosen,
            load_loss(chosen.loss, SUPPORT),
            torch.device("cpu"),
            load_metrics(chosen.held_out_metrics, SUPPORT),
        )
        assert found["held_out_loss"] == pytest.approx(plain["held_out_loss"], rel=1e-6)
        assert found.get("held_out_accuracy") == plain.get("held_out_accuracy")
        assert found.get("held_out_margin") == pytest.approx(plain.get("held_out_margin"))
    summary = json.loads((job.run / "summary.json").read_text())
    assert summary["held_out_loss"] == tried(job)[-1]["held_out_loss"]


def assert_told_again(job: Job, expected: dict[str, float], name: str) -> None:
    """--evaluate-only found what the run had found when it wrote the checkpoint."""
    found = json.loads((job.run / "evaluation.json").read_text())
    assert Path(found["checkpoint"]).name == name
    assert found["held_out_examples"] == 21
    for key in expected.keys() - {"epoch"}:
        assert found[key] == pytest.approx(expected[key], rel=1e-6)


def test_a_metric_is_exact_over_a_smaller_last_minibatch() -> None:
    """A mean of means would be 0.5: the sum of all sums over the sum of all counts is 0.2. What
    no minibatch has a value of is left out.
    """
    one, other = EvaluationTotals(), EvaluationTotals()
    one.add(1.0, 4, None, {"found": (0.0, 4.0), "none": (0.0, 0.0)})
    other.add(1.0, 1, None, {"found": (1.0, 1.0), "none": (0.0, 0.0)})
    sent = json.loads(json.dumps([astuple(one), astuple(other)]))
    assert EvaluationTotals.result(sent) == {"held_out_loss": 1.0, "held_out_found": 0.2}


@pytest.mark.thorough
@pytest.mark.slow
def test_what_was_not_tried_when_a_run_ended_is_tried_when_it_goes_on(tmp_path: Path) -> None:
    """A worker was killed between the checkpoint and the held-out data; the run goes on."""
    inputs = (torch.randn(4, 6),)
    graph = capture(small_models.Noisy(), inputs).graph
    plan = make_plan(graph, cut(graph, 2), (1, 1))
    job = Job(plan, config("Noisy", "classes", examples=84), SUPPORT, tmp_path / "run", epochs=2)
    run_jobs([job])
    found = tried(job)
    timeline = (job.run / "timeline.json").read_text()
    (job.run / "held_out.jsonl").unlink()
    run_jobs([replace(job, restarted=True)])
    assert tried(job) == found
    summary = json.loads((job.run / "summary.json").read_text())
    assert summary["held_out_loss"] == found[0]["held_out_loss"]
    assert (job.run / "timeline.json").read_text() == timeline, "of a run that trained nothing"


def test_a_run_that_goes_on_writes_no_epoch_twice(tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"epoch": 1}\n{"epoch": 2}\n{"epo')
    keep_until(path, 1)
    assert path.read_text() == '{"epoch": 1}\n'
    keep_until(path, 0)
    assert path.read_text() == ""


def test_forward_passes_in_the_order_of_the_minibatches() -> None:
    """Two replicas, then one that also feeds the last past its neighbour."""
    links = [(0, 1), (1, 2), (0, 2)]
    shown = {
        worker: " ".join(map(str, forwards((2, 1, 1), links, 3, [worker])))
        for worker in [(0, 0), (0, 1), (1, 0), (2, 0)]
    }
    assert shown == {
        (0, 0): "0F0 0SA0>1 0SA0>2 0F2 0SA2>1 0SA2>2",
        (0, 1): "0.1F1 0.1SA1>1 0.1SA1>2",
        (1, 0): "1RA0<0 1F0 1SA0>2 1RA1<0.1 1F1 1SA1>2 1RA2<0 1F2 1SA2>2",
        (2, 0): "2RA0<0 2RA0<1 2F0 2RA1<0.1 2RA1<1 2F1 2RA2<0 2RA2<1 2F2",
    }


def test_examples_weigh_the_same_in_any_minibatch() -> None:
    one, other = EvaluationTotals(), EvaluationTotals()
    one.add(2.0, 4, (3, 4))
    other.add(7.0, 1, (0, 1))
    totals = (one, other, EvaluationTotals())
    assert EvaluationTotals.result(astuple(each) for each in totals) == {
        "held_out_loss": pytest.approx(3.0),
        "held_out_accuracy": pytest.approx(0.6),
    }


class Changing(torch.nn.Module):
    """Has a layer in training that it has not in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = small_models.Layer(6), small_models.Layer(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) if self.training else self.a(x)


def test_what_cannot_go_through_the_pipeline() -> None:
    model, inputs = Changing(), (torch.randn(4, 6),)
    graph = capture(model, inputs).graph
    plan = make_plan(graph, cut(graph, 2), (1, 1))
    batch = Batch(inputs, None)
    in_eval = capture(model, inputs, training=False)
    why = obstacle(in_eval, plan, batch, batch.kind)
    assert why is not None
    assert "in eval mode the model has another structure" in why
    assert "no more nodes" in why
    same = capture(model, inputs)
    assert obstacle(same, plan, batch, batch.kind) is None
    assert "its inputs are [6]" in (obstacle(same, plan, batch, "another") or "")
