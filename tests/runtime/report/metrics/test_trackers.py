"""The writers for W&B and MLflow, against records of their calls; for MLflow also the real one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pipedream.graph.errors import UserError
from pipedream.graph.run_config import MetricsConfig
from pipedream.runtime.report.metrics.writer import MetricsWriter
from pipedream.runtime.report.metrics.writers import MLflow, WeightsAndBiases
from pipedream.runtime.run import job

CONFIG = {"optimizer": {"name": "SGD", "args": {"lr": 0.25}}, "replicas": [2, 1]}


class Records:
    """Any method of it can be called, and is noted; `answers` has what some return."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.calls = answers, list[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args, kwargs) if kwargs else (name, *args))
            return self.answers.get(name)

        return note


def tell(writer: MetricsWriter, folder: Path, first: int = 0) -> None:
    """Two minibatches, which are an epoch."""
    writer.begin(folder, CONFIG, first)
    writer.minibatch(first, 0.5)
    writer.minibatch(first + 1, 0.25)
    writer.progress(first + 2, {"learning rate": 0.25})
    writer.epoch(1, first + 2, {"mean loss": 0.375})


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Records()
    run.id, run.summary = "abc", {}
    module = Records(init=run)
    monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]
    writer = WeightsAndBiases(project="mine", mode="offline")
    tell(writer, tmp_path)
    writer.end({"final_loss": 0.25})
    ((_, begun),) = module.calls
    assert begun == {
        "dir": str(tmp_path),
        "config": CONFIG,
        "resume": "allow",
        "project": "mine",
        "mode": "offline",
    }
    assert run.calls == [
        ("define_metric", "minibatch", {"hidden": True}),
        ("define_metric", "*", {"step_metric": "minibatch"}),
        ("log", {"minibatch": 0, "loss": 0.5}),
        ("log", {"minibatch": 1, "loss": 0.25}),
        ("log", {"minibatch": 2, "learning rate": 0.25}),
        ("log", {"minibatch": 2, "epoch": 1, "mean loss": 0.375}),
        ("finish", {"exit_code": 0}),
    ]
    assert run.summary == {"final_loss": 0.25}
    for first, known in ((0, None), (2, "abc")):  # one that begins, one that goes on
        module.calls.clear()
        tell(writer, tmp_path, first)
        writer.end(None)
        assert module.calls[0][1].get("id") == known
    assert run.calls[-1] == ("finish", {"exit_code": 1})


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created = SimpleNamespace(info=SimpleNamespace(run_id="abc"))
    client = Records(create_run=created, create_experiment="7")
    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    monkeypatch.setattr(module, "MlflowClient", lambda tracking_uri: client, raising=False)
    for name in ("Metric", "Param"):
        monkeypatch.setattr(entities, name, lambda *values: values, raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setattr("time.time", lambda: 1.0)
    writer = MLflow(experiment="mine", run_name="first")
    tell(writer, tmp_path)
    writer.end({"final_loss": 0.25})
    parameters = [("optimizer.name", "SGD"), ("optimizer.args.lr", "0.25"), ("replicas", "[2, 1]")]
    sent = [("loss", 0.5, 1000, 0), ("loss", 0.25, 1000, 1), ("learning rate", 0.25, 1000, 2)]
    assert client.calls[:4] == [
        ("get_experiment_by_name", "mine"),
        ("create_experiment", "mine"),
        ("create_run", "7", {"run_name": "first"}),
        ("log_batch", "abc", {"params": parameters}),
    ]
    assert client.calls[4:] == [
        ("log_batch", "abc", {"metrics": sent}),
        ("log_batch", "abc", {"metrics": [("mean loss", 0.375, 1000, 2)]}),
        ("log_dict", "abc", {"final_loss": 0.25}, "summary.json"),
        ("set_terminated", "abc", "FINISHED"),
    ]
    client.calls.clear()
    tell(writer, tmp_path, 2)
    writer.end(None)
    assert client.calls[0] == ("update_run", "abc", {"status": "RUNNING"})
    assert client.calls[-1] == ("set_terminated", "abc", "FAILED")


def test_mlflow_itself(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    address = f"sqlite:///{tmp_path}/mlflow.db"
    writer = MLflow(tracking_uri=address)
    tell(writer, tmp_path)
    writer.end(None)
    client = mlflow.MlflowClient(tracking_uri=address)
    history = client.get_metric_history((tmp_path / "mlflow-id").read_text().strip(), "loss")
    assert [(each.step, each.value) for each in history] == [(0, 0.5), (1, 0.25)]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_one_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "find_spec", lambda name: None)
    asked = job.Job.__new__(job.Job)
    config = SimpleNamespace(metrics=(MetricsConfig(source=name),))
    object.__setattr__(asked, "config", config)
    with pytest.raises(UserError, match=f"metrics {name}: .* missing: pip install {name}"):
        asked.check_metrics()
