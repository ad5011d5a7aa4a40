"""The losses on their way to rank 0, and summary.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from pipedream.comm.device.host_copy import HostCopy
from pipedream.comm.device.threads import start_thread
from pipedream.graph.command import write_whole
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import AUTO
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.runtime.report.expectation import figures
from pipedream.runtime.report.page.finished_run import FinishedRun
from pipedream.runtime.run.job import SUMMARY

_CPU = torch.device("cpu")


class Losses:
    """Sends the losses from the replicas of the last stage to rank 0, through the store.

    A thread does it, so that no pass waits for the store or for a GPU.
    """

    def __init__(
        self,
        store: Store,
        epoch: int,
        minibatches: int,
        first: int = 0,
        refuse_nan: bool = True,
        device: torch.device = _CPU,
    ) -> None:
        self.store, self.epoch, self.minibatches = store, epoch, minibatches
        self.refuse_nan = refuse_nan
        self.first = self.next = first
        self.failure: BaseException | None = None
        self.waiting: SimpleQueue[tuple[int, HostCopy] | None] = SimpleQueue()
        self.thread = start_thread(self._send_all, "losses", device)

    def send(self, minibatch: int, loss: torch.Tensor) -> None:
        """Raises UserError if an earlier loss was not finite: no later one would be."""
        if self.failure is not None:
            raise self.failure
        self.waiting.put((minibatch, HostCopy.begin(loss)))

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

    def _send(self, minibatch: int, loss: HostCopy) -> None:
        value = loss.wait().item()
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
    return [f"{name:<19} {value}" for name, value in held_out_figures(metrics).items()]


def held_out_figures(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Returns the held-out metrics as text, by the names that people read."""
    forms = {"loss": ".4f", "accuracy": ".1%", **dict.fromkeys(own_metrics(metrics), ".4g")}
    return {
        f"held-out {name}": f"{metrics[f'held_out_{name}']:{form}}"
        for name, form in forms.items()
        if f"held_out_{name}" in metrics
    }


def peak_memory(summary: Mapping[str, Any]) -> tuple[float, str]:
    """Returns the bytes of the rank that had most, and in words which that is, what was planned
    for it, and what else its GPU had to hold.
    """
    fullest = max(summary["ranks"], key=lambda rank: rank["peak_memory_bytes"])
    planned = fullest["predicted_memory_bytes"]
    more = f", planned {show_bytes(planned)}" if planned else ""
    if fullest.get("process_memory_bytes") is not None:
        process, expected = fullest["process_memory_bytes"], fullest["predicted_process_bytes"]
        more += f"; the process held {show_bytes(process)}"
        more += f", planned {show_bytes(expected)}" if expected else ""
    if fullest["reserved_memory_bytes"] is not None:
        reserved, rest = fullest["reserved_memory_bytes"], fullest["rest_of_gpu_bytes"]
        more += (
            f"; torch reserved {show_bytes(reserved)}, the rest on the GPU is {show_bytes(rest)}"
        )
    return fullest["peak_memory_bytes"], f"on rank {fullest['rank']}{more}"


def held_out_lines(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of held_out.jsonl in the folder of a run; none without that file."""
    path = run / "held_out.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def own_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns those of the user among the held-out metrics, by their names."""
    return {
        name.removeprefix("held_out_"): value
        for name, value in metrics.items()
        if name.startswith("held_out_") and name not in ("held_out_loss", "held_out_accuracy")
    }


def _in_a_run(summary: Mapping[str, Any], seconds: float) -> str:
    """Returns the expected seconds, with those of nine of ten runs where they are for such a run,
    and whether this is one of them.
    """
    if summary.get("expected_interval") is None:
        return show_seconds(seconds)
    least, most = summary["expected_interval"]
    inside = least <= summary["seconds_per_minibatch"] <= most
    within = f"({show_seconds(least)} to {show_seconds(most)} in nine of ten runs)"
    return f"{show_seconds(seconds)} {within}{'' if inside else ': this is another one'}"


def write_summary(run: FinishedRun, also: str) -> None:
    """Writes summary.json in the run's folder, and the main figures to standard output.

    `also`: other files that were written there.
    """
    job, summary, comparison = run.job, run.summary, run.comparison
    write_whole(job.run / SUMMARY, json.dumps(summary, indent=1) + "\n")
    measured = summary["seconds_per_minibatch"]
    wanted = expected_seconds(summary)
    beside = "" if wanted is None else f", expected {_in_a_run(summary, wanted)}"
    lines = []
    if measured:  # else there was nothing left to train
        rate = f"{summary['samples_per_second']:.0f}" + " in the steady state" * run.spent.steady
        lines = [
            f"time per minibatch  {show_seconds(measured)}{beside}",
            *(figures(comparison) if comparison is not None else []),
            *(f"  {line}" for line in run.reason),
            f"samples per second  {rate}",
        ]
    if not job.has_planned_batch:
        planned = job.plan.batch_size
        lines.append(f"planned             for minibatches of {planned}, unlike this run's")
    if not job.has_planned_compile:
        ways = (job.plan.compile, job.compile_backend)
        before, now = ("not compiled" if way is None else f"compiled by {way}" for way in ways)
        lines.append(f"planned             for stages {before}; these are {now}")
    if job.config.compile == AUTO:
        lines.append(f"compiled            {job.compile_backend or 'no'}, as the plan says")
    if summary["final_loss"] is not None:
        lines.append(f"final loss          {summary['final_loss']:.4f}")
    lines += show_metrics(summary)
    if left_out := max(rank["updates_left_out"] for rank in summary["ranks"]):
        lines.append(f"updates left out    {left_out}: non-finite gradients")
    peak, of_rank = peak_memory(summary)
    lines += [f"memory              {show_bytes(peak)} {of_rank}", *run.advice]
    print("\n".join(lines))
    print(f"Written: {job.run}/summary.json, metrics.jsonl, {also}checkpoints")
