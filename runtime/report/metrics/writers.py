"""The metrics writers with names of their own, and all those of a run, kept from harming it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipedream.capture.errors.user_code import blame, blaming, call, load_function
from pipedream.graph.command import write_whole
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import MetricsConfig
from pipedream.runtime.report.metrics.writer import MetricsWriter
from pipedream.runtime.run.job import Job

_WANDB_STEP = "minibatch"

_MOST_AT_ONCE = 1_000
_MOST_PARAMETERS = 100
_LONGEST = 500
"""Limits of MLflow on one call, and on the text of a parameter."""


class TensorBoard(MetricsWriter):
    """Scalars in the folder `tensorboard` of the run; `args` are those of torch's SummaryWriter."""

    def __init__(self, **args: Any) -> None:
        self.args = args

    def begin(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(**{"log_dir": str(folder / "tensorboard"), **self.args})

    def minibatch(self, step: int, loss: float) -> None:
        self.writer.add_scalar("loss", loss, step)

    def progress(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        self.progress(step, metrics)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        self.writer.close()


class WeightsAndBiases(MetricsWriter):
    """A run of wandb (https://docs.wandb.ai/ref/python); `args` are those of `wandb.init`, such as
    `project` or `mode: offline`.

    A resumed run goes on with the same one, whose id is in the file wandb-id of the folder.
    """

    def __init__(self, **args: Any) -> None:
        self.args = args

    def begin(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        import wandb

        known = folder / "wandb-id"
        before = {"id": known.read_text("utf-8").strip()} if step and known.exists() else {}
        defaults = {"dir": str(folder), "config": dict(config), "resume": "allow", **before}
        self.run = wandb.init(**{**defaults, **self.args})
        write_whole(known, f"{self.run.id}\n")
        # What a resumed run tells again would be refused by wandb's own steps.
        self.run.define_metric(_WANDB_STEP, hidden=True)
        self.run.define_metric("*", step_metric=_WANDB_STEP)

    def minibatch(self, step: int, loss: float) -> None:
        self.run.log({_WANDB_STEP: step, "loss": loss})

    def progress(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({_WANDB_STEP: step, **metrics})

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({_WANDB_STEP: step, "epoch": epoch, **metrics})

    def end(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self.run.summary.update(dict(summary))
        self.run.finish(exit_code=int(summary is None))


@dataclass(eq=False)
class MLflow(MetricsWriter):
    """A run of MLflow, in the `experiment`, at the `tracking_uri`. [default: MLflow's own]

    A resumed run goes on with the same one, whose id is in the file mlflow-id of the folder.
    Metrics are sent every few seconds, not one by one, by its client
    (https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html).
    """

    tracking_uri: str | None = None
    experiment: str = "Default"
    run_name: str | None = None
    waiting: list[Any] = field(default_factory=list, init=False)

    def begin(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        # Its client knows no active run, which would be of one thread alone.
        from mlflow import MlflowClient

        self.client, known = MlflowClient(tracking_uri=self.tracking_uri), folder / "mlflow-id"
        if step and known.exists():
            self.id = known.read_text("utf-8").strip()
            self.client.update_run(self.id, status="RUNNING")
            return
        experiment = self.client.get_experiment_by_name(self.experiment)
        number = experiment and experiment.experiment_id
        number = number or self.client.create_experiment(self.experiment)
        self.id = self.client.create_run(number, run_name=self.run_name or folder.name).info.run_id
        write_whole(known, f"{self.id}\n")
        self._log_parameters(config)

    def minibatch(self, step: int, loss: float) -> None:
        self._add(step, {"loss": loss})

    def progress(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, metrics)
        self._send()

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, metrics)
        self._send()

    def end(self, summary: Mapping[str, Any] | None) -> None:
        self._send()
        if summary is not None:
            self.client.log_dict(self.id, dict(summary), "summary.json")
        self.client.set_terminated(self.id, "FAILED" if summary is None else "FINISHED")

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        self.waiting += [Metric(name, value, now, step) for name, value in metrics.items()]

    def _send(self) -> None:
        while self.waiting:
            self.client.log_batch(self.id, metrics=self.waiting[:_MOST_AT_ONCE])
            del self.waiting[:_MOST_AT_ONCE]

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [Param(name, str(value)[:_LONGEST]) for name, value in _flat(config)]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            part = parameters[first : first + _MOST_PARAMETERS]
            self.client.log_batch(self.id, params=part)


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields names such as `optimizer.args.lr` with their values."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


_BY_NAME = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


class Writers:
    """All writers of a run, by what the run config calls them. One that fails is left out."""

    def __init__(self, writers: Mapping[str, MetricsWriter]) -> None:
        self.writers = dict(writers)
        self.over = False

    @staticmethod
    def of(job: Job) -> Writers:
        """Raises UserError if one cannot be made."""
        return Writers({each.source: _make(each, job.directory) for each in job.metrics})

    def begin(self, job: Job, step: int) -> None:
        """Raises UserError if a writer does not begin."""
        config = job.config.model_dump(mode="json", exclude_none=True)
        config |= {"schedule": job.schedule, "epochs": job.epochs, "device": job.device}
        config |= {"replicas": list(job.plan.replicas)}
        for name, writer in self.writers.items():
            with blaming(f"metrics {name}: begin"):
                writer.begin(job.run, config, step)

    def minibatch(self, step: int, loss: float) -> None:
        self._tell("minibatch", lambda writer: writer.minibatch(step, loss))

    def progress(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tell("progress", lambda writer: writer.progress(step, metrics))

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        self._tell("epoch", lambda writer: writer.epoch(epoch, step, metrics))

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """The first call counts: a run that has ended well cannot fail any more."""
        if not self.over:
            self.over = True
            self._tell("end", lambda writer: writer.end(summary))

    def _tell(self, method: str, tell: Callable[[MetricsWriter], None]) -> None:
        for name, writer in list(self.writers.items()):
            try:
                tell(writer)
            except (Exception, SystemExit) as error:
                del self.writers[name]
                why = UserError(f"metrics {name}: {method}: {blame(error)}").format_message()
                print(f"pd-train: {why}; the run goes on without it", file=sys.stderr, flush=True)


def _make(config: MetricsConfig, directory: Path) -> MetricsWriter:
    source = f"metrics {config.source}"
    kind: Any = _BY_NAME.get(config.source) or load_function(config.source, directory)
    if not (isinstance(kind, type) and issubclass(kind, MetricsWriter)):
        raise UserError(f"{source}: this is not a subclass of pipedream.MetricsWriter")
    writer: MetricsWriter = call(source, kind, config.args)
    return writer
