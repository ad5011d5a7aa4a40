"""Metrics writers as users write them; named in run configs as metrics_writers:X."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipedream import MetricsWriter


class Lines(MetricsWriter):
    """Writes each call as a line of calls.jsonl in the folder of the run."""

    def __init__(self, name: str = "calls.jsonl") -> None:
        self.name = name

    def begin(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        self.path = folder / self.name
        self._write("begin", config, step)

    def minibatch(self, step: int, loss: float) -> None:
        self._write("minibatch", step, loss)

    def progress(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("progress", step, metrics)

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        self._write("epoch", epoch, step, metrics)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        self._write("end", summary)

    def _write(self, *words: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(words) + "\n")


class Fails(Lines):
    """Raises at the third minibatch."""

    def minibatch(self, step: int, loss: float) -> None:
        if step == 2:
            raise ValueError("no more\nplease")
        super().minibatch(step, loss)


class Refuses(MetricsWriter):
    """Raises, or leaves, at the beginning."""

    def __init__(self, leave: bool = False) -> None:
        self.leave = leave

    def begin(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        if self.leave:
            raise SystemExit("bye")
        raise KeyError("project")


class NoWriter:
    pass
