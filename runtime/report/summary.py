"""The losses on their way to rank 0, and summary.json."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from pipedream.graph.command import write_whole
from pipedream.graph.errors import UserError
from pipedream.graph.measured_run import MeasuredRun
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.runtime.report.expectation import advice, compare, figures
from pipedream.runtime.run.job import SUMMARY


class Losses:
    """Sends the losses from the replicas of the last stage to rank 0, through the store.

    A thread does it, so that no pass waits for the store or for a GPU.
    """

    def __init__(
        self, store: Store, epoch: int, minibatches: int, first: int = 0, refuse_nan: bool = True
    ) -> None:
        self.store, self.epoch, self.minibatches = store, epoch, minibatches
        self.refuse_nan = refuse_nan
        self.first = self.next = first
        self.failure: BaseException | None = None
        self.waiting: SimpleQueue[tuple[int, torch.Tensor] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._send_all, name="losses", daemon=True)
        self.thread.start()

    def send(self, minibatch: int, loss: torch.Tensor) -> None:
        """Raises UserError if an earlier loss was not finite: no later one would be."""
        if self.failure is not None:
            raise self.failure
        self.waiting.put((minibatch, loss))

    def end(self) -> None:
        """Waits until all losses are in the store. Raises as `send` does."""
        self.waiting.put(None)
        self.thread.join()
        if self.failure is not None:
            raise self.failure

    def _send_all(self) -> None:
        while (waiting := self.waiting.get()) is not None:
            try:
                self._send(*waiting)
            except Exception as error:
                self.failure = error
                return

    def _send(self, minibatch: int, loss: torch.Tensor) -> None:
        value = loss.item()
        if not math.isfinite(value) and self.refuse_nan:
            raise UserError(
                f"the loss of minibatch {minibatch} in epoch {self.epoch} is {value}: choose a "
                "smaller learning rate, look for nan in the data, or write nan: skip"
            )
        self.store.set(self._key(minibatch), repr(value))

    def received(self) -> list[tuple[int, float]]:
        """Returns the losses that have arrived since the last call, by ascending minibatch."""
        losses = []
        while self.next < self.minibatches and self.store.check([self._key(self.next)]):
            key = self._key(self.next)
            losses.append((self.next, float(self.store.get(key))))
            self.store.delete_key(key)
            self.next += 1
        return losses

    def _key(self, minibatch: int) -> str:
        return f"loss/{self.epoch}/{minibatch}"


def expected_seconds(summary: Mapping[str, Any]) -> float | None:
    """Returns what stands beside the measured time of a minibatch, if the plan says anything."""
    keys = ("expected_seconds_per_minibatch", "predicted_seconds_per_minibatch")
    return next((summary[key] for key in keys if summary.get(key) is not None), None)


def show_metrics(metrics: Mapping[str, Any]) -> list[str]:
    """Returns the lines that tell of the held-out metrics, if there are any."""
    lines = []
    if "held_out_loss" in metrics:
        lines.append(f"held-out loss       {metrics['held_out_loss']:.4f}")
    if "held_out_accuracy" in metrics:
        lines.append(f"held-out accuracy   {metrics['held_out_accuracy']:.1%}")
    own = own_metrics(metrics).items()
    return [*lines, *(f"{f'held-out {name}':<19} {value:.4g}" for name, value in own)]


def own_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns those of the user among the held-out metrics, by their names."""
    return {
        name.removeprefix("held_out_"): value
        for name, value in metrics.items()
        if name.startswith("held_out_") and name not in ("held_out_loss", "held_out_accuracy")
    }


def write_summary(
    run: Path,
    summary: Mapping[str, Any],
    also: str,
    steady: bool,
    planned_for: int | None,
    measured_run: MeasuredRun | None = None,
) -> None:
    """Writes summary.json in the run's folder, and the main figures to standard output.

    `also`: other files that were written there. `steady`: whether times are of the steady state.
    `planned_for`: the batch size of the plan, if the run has another. `measured_run`: what was
    written to measured.json.
    """
    write_whole(run / SUMMARY, json.dumps(summary, indent=1) + "\n")
    measured = summary["seconds_per_minibatch"]
    wanted = expected_seconds(summary)
    beside = "" if wanted is None else f", expected {show_seconds(wanted)}"
    comparison = None if measured_run is None else compare(measured_run)
    lines = []
    if measured:  # else there was nothing left to train
        rate = f"{summary['samples_per_second']:.0f}" + " in the steady state" * steady
        lines = [
            f"time per minibatch  {show_seconds(measured)}{beside}",
            *(figures(comparison) if comparison is not None else []),
            f"samples per second  {rate}",
        ]
    if planned_for is not None:
        lines.append(f"planned             for minibatches of {planned_for}, unlike this run's")
    if summary["final_loss"] is not None:
        lines.append(f"final loss          {summary['final_loss']:.4f}")
    lines += show_metrics(summary)
    if left_out := max(rank["updates_left_out"] for rank in summary["ranks"]):
        lines.append(f"updates left out    {left_out}: non-finite gradients")
    fullest = max(summary["ranks"], key=lambda rank: rank["peak_memory_bytes"])
    measured_memory = show_bytes(fullest["peak_memory_bytes"])
    planned = fullest["predicted_memory_bytes"]
    more = f", planned {show_bytes(planned)}" if planned else ""
    lines.append(f"memory              {measured_memory} on rank {fullest['rank']}{more}")
    if comparison is not None and measured_run is not None:
        lines += advice(comparison, measured_run, run)
    print("\n".join(lines))
    print(f"Written: {run}/summary.json, metrics.jsonl, {also}checkpoints")
