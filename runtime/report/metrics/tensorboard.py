"""TensorBoard logs: losses and the state of the ranks, over the minibatches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipedream.runtime.report.metrics.writer import MetricsWriter


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
