"""Makes the metrics writers of a run, and keeps it from harm that they do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipedream.capture.errors.user_code import blame, blaming, call, load_function
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import MetricsConfig
from pipedream.runtime.report.metrics.mlflow_run import MLflow
from pipedream.runtime.report.metrics.tensorboard import TensorBoard
from pipedream.runtime.report.metrics.weights_and_biases import WeightsAndBiases
from pipedream.runtime.report.metrics.writer import MetricsWriter
from pipedream.runtime.run.job import Job

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
