"""The class of those that get what a run measures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsWriter:
    """Gets what a run measures as it goes on, on rank 0. Override what you want; the methods here
    do nothing. The run config names the class: `metrics: package.module:Class`.

    Names are such as `loss` and `busy share/rank 0`. A `step` is the number of minibatches from the
    beginning of the run, also of those before it was resumed: a resumed run tells again what came
    after its checkpoint. Methods are called one at a time, in a thread beside the computation or
    between epochs: what takes long should be kept for a thread of the writer's own.

    An error in the constructor or `begin` ends the run before it trains. After an error in another
    method the run goes on without this writer, and says so.
    """

    def begin(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """The run begins, or goes on at `step` if that is not 0. `folder` has its results; `config`
        is the run config with its defaults, and the schedule, epochs, device and `replicas` of each
        stage.
        """

    def minibatch(self, step: int, loss: float) -> None:
        """The loss of minibatch number `step`; nan if it was not finite and the run goes on."""

    def progress(self, step: int, metrics: Mapping[str, float]) -> None:
        """Every second or two: samples per second, learning rates, and of each rank the busy share
        and the bytes of memory.
        """

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """After `epoch` epochs: their last one's mean loss and samples per second; if held-out data
        are tried between epochs, again with the results.
        """

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """The run is over, with what summary.json has; None if it was stopped or has failed."""
