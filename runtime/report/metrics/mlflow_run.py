"""MLflow: https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipedream.graph.command import write_whole
from pipedream.runtime.report.metrics.writer import MetricsWriter

_MOST_AT_ONCE = 1_000
_MOST_PARAMETERS = 100
_LONGEST = 500
"""Limits of MLflow on one call, and on the text of a parameter."""


class MLflow(MetricsWriter):
    """A run of MLflow, in the `experiment`, at the `tracking_uri`. [default: MLflow's own]

    A resumed run goes on with the same one, whose id is in the file mlflow-id of the folder.
    Metrics are sent every few seconds, not one by one.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "Default",
        run_name: str | None = None,
    ) -> None:
        self.tracking_uri, self.experiment, self.run_name = tracking_uri, experiment, run_name
        self.waiting: list[Any] = []

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
