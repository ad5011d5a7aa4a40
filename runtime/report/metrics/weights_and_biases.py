"""Weights & Biases: https://docs.wandb.ai/ref/python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipedream.graph.command import write_whole
from pipedream.runtime.report.metrics.writer import MetricsWriter

_STEP = "minibatch"


class WeightsAndBiases(MetricsWriter):
    """A run of wandb; `args` are those of `wandb.init`, such as `project` or `mode: offline`.

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
        self.run.define_metric(_STEP, hidden=True)
        self.run.define_metric("*", step_metric=_STEP)

    def minibatch(self, step: int, loss: float) -> None:
        self.run.log({_STEP: step, "loss": loss})

    def progress(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({_STEP: step, **metrics})

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({_STEP: step, "epoch": epoch, **metrics})

    def end(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self.run.summary.update(dict(summary))
        self.run.finish(exit_code=int(summary is None))
