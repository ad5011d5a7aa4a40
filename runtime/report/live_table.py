"""What rank 0 shows while a run goes on, and metrics.jsonl."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pipedream.graph.command import whole
from pipedream.graph.errors import UserError
from pipedream.graph.plan import RankAssignment, workers_by_rank
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.runtime.data.order import Sizes
from pipedream.runtime.report.metrics.writers import Writers
from pipedream.runtime.report.summary import Losses, own_metrics
from pipedream.runtime.run.training_segment import Position
from pipedream.runtime.supervise.launch import draining
from pipedream.runtime.supervise.status import SECONDS_BETWEEN_STATUSES, Status, published_statuses
from pipedream.schedule.action import Worker, stages_and_replicas

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_BETWEEN_LINES = 30.0
"""Where no terminal is, besides the line for each epoch."""

_STUCK_SECONDS = 2.0


@dataclass(eq=False)
class Display:
    """The table by rank, the progress bar and metrics.jsonl of rank 0. A context manager.

    `minibatches`: how many the run still has to do after `first`. `learning_rates` returns that of
    each parameter group. `stopping` returns whether the launcher has asked the run to stop: what it
    writes to a terminal itself is gone when the table is next drawn.
    """

    path: Path
    sizes: Sizes
    minibatches: int
    assignment: RankAssignment
    writers: Writers
    first: Position
    learning_rates: Callable[[], Sequence[float]]
    stopping: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.workers, self.told_stopping = workers_by_rank(self.assignment), False
        self.console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("{task.fields[rate]:.0f} samples/s"),
            TimeRemainingColumn(),
        )
        self.task = self.progress.add_task(
            "training", total=self.minibatches, loss=float("nan"), rate=0.0
        )
        self.live = Live(self.progress, console=self.console, refresh_per_second=2)
        self.begin = self.epoch_begin = self.line_printed = self.asked = time.perf_counter()
        self.done = self.samples = 0
        self.last_loss: float | None = None
        self.loss_sum, self.losses = 0.0, 0
        self.recorded = self.first
        self.failure: UserError | None = None
        self.statuses: Mapping[int, Status] = {}
        self.reporting: Callable[[], str | None] = lambda: None

    @property
    def rate(self) -> float:
        """Returns the samples per second of this epoch."""
        return self.samples / (time.perf_counter() - self.epoch_begin)

    def __enter__(self) -> Display:
        before = keep_before(self.path, self.first)
        loss = before.get("loss")
        self.last_loss = loss if isinstance(loss, float) else None
        # Those of an epoch that is over are about to be tried again.
        keep_until(
            self.path.with_name("held_out.jsonl"), self.first.epoch - (not self.first.minibatch)
        )
        self.file: TextIO = self.path.open("a", encoding="utf-8")
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.update(self.progress)
            self.live.stop()
        with suppress(OSError):  # a full disk was reported before
            self.file.close()

    @contextmanager
    def watching(self, losses: Losses) -> Iterator[None]:
        """Shows and writes down the losses of an epoch as they come, beside the compute."""
        ended = threading.Event()
        self.epoch_begin, self.samples = time.perf_counter(), 0

        def watch() -> None:
            while not ended.wait(SECONDS_BETWEEN_LOOKS) and self.failure is None:
                self._look_or_note(losses)

        thread = threading.Thread(target=watch, name="display", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def has_recorded(self, position: Position) -> bool:
        """Tells whether metrics.jsonl is written up to there. Raises UserError if it cannot be."""
        if self.failure is not None:
            raise self.failure
        return self.recorded >= position

    def note(self, line: str) -> None:
        """Prints a line; any thread may."""
        self._line(line)

    def _look_or_note(self, losses: Losses) -> None:
        try:
            self._look(losses)
        except OSError as error:
            self.failure = UserError(f"{self.path}: cannot be written: {error.strerror}")
            self.failure.__cause__ = error

    def end_epoch(self, losses: Losses) -> None:
        """Writes down what is left of an epoch, and prints a line of it.

        Raises UserError where the disk refuses.
        """
        self._look_or_note(losses)
        if self.failure is not None:
            raise self.failure
        self._ask(losses)
        if not self.losses:  # asked to stop before the first minibatch
            return
        mean = self.loss_sum / self.losses
        self.loss_sum, self.losses = 0.0, 0
        whole_epoch = (losses.first, losses.next) == (0, losses.minibatches)
        if whole_epoch:
            step, rate = losses.epoch * losses.minibatches, self.rate
            self.writers.epoch(losses.epoch, step, {"mean loss": mean, "samples per second": rate})
        part = "" if whole_epoch else f", minibatches {losses.first} to {losses.next - 1}"
        self._line(f"epoch {losses.epoch}{part}: mean loss {mean:.4f}, {self.rate:.0f} samples/s")

    def held_out(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Writes down how the held-out data went after an epoch; `step` counts its minibatches."""
        with self.path.with_name("held_out.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"epoch": epoch, **metrics}) + "\n")
        named = {name.replace("_", "-", 1).replace("_", " "): x for name, x in metrics.items()}
        self.writers.epoch(epoch, step, named)
        text = f"epoch {epoch}: held-out loss {metrics['held_out_loss']:.4f}"
        if "held_out_accuracy" in metrics:
            text += f", accuracy {metrics['held_out_accuracy']:.1%}"
        text += "".join(f", {name} {value:.4g}" for name, value in own_metrics(metrics).items())
        self._line(text)

    def _look(self, losses: Losses) -> None:
        now = time.perf_counter()
        if self.console.is_terminal and not self.told_stopping and self.stopping():
            self.told_stopping = True
            self._line(draining(signal.SIGINT))
        for minibatch, loss in losses.received():
            self.done += 1
            self.samples += self.sizes.of(minibatch)
            self.last_loss = loss
            self.loss_sum += loss
            self.losses += 1
            seconds = round(now - self.begin, 4)
            line = {"epoch": losses.epoch, "minibatch": minibatch, "loss": loss, "seconds": seconds}
            self.file.write(json.dumps(line) + "\n")
            self.writers.minibatch((losses.epoch - 1) * losses.minibatches + minibatch, loss)
        self.file.flush()
        whole = losses.next == losses.minibatches
        self.recorded = Position(losses.epoch - (not whole), 0 if whole else losses.next)
        if self.last_loss is not None:
            self.progress.update(
                self.task,
                completed=self.done,
                description=f"epoch {losses.epoch}",
                loss=self.last_loss,
                rate=self.rate,
            )
        if now - self.asked > SECONDS_BETWEEN_STATUSES:
            self._ask(losses)
            self._show(losses)

    def _ask(self, losses: Losses) -> None:
        """Brings what is known of the ranks up to date."""
        self.asked = time.perf_counter()
        self.statuses = published_statuses(losses.store, list(self.workers))
        if (report := self.reporting()) is not None:
            self._line(report)
        step = (losses.epoch - 1) * losses.minibatches + losses.next
        self.writers.progress(step, _progress(self.rate, self.learning_rates(), self.statuses))

    def _show(self, losses: Losses) -> None:
        """Shows the table in a terminal, and elsewhere now and then a line."""
        if self.console.is_terminal:
            most = max(1, self.console.height - 8)
            self.live.update(Group(table(self.statuses, self.workers, most), self.progress))
        elif time.perf_counter() - self.line_printed > SECONDS_BETWEEN_LINES and self.done:
            self._line(
                f"epoch {losses.epoch}: {losses.next} of {losses.minibatches} minibatches, "
                f"loss {self.last_loss:.4f}, {self.rate:.0f} samples/s{in_words(self.statuses)}"
            )

    def _line(self, text: str) -> None:
        self.line_printed = time.perf_counter()
        if self.console.is_terminal:
            self.live.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


def keep_before(path: Path, position: Position) -> dict[str, Any]:
    """Drops from metrics.jsonl what a run that goes on from `position` will write again. Returns
    the last line that stays.
    """
    return _keep(path, lambda line: Position(line["epoch"] - 1, line["minibatch"]) < position)


def keep_until(path: Path, epoch: int) -> None:
    """Drops from held_out.jsonl what a run that goes on after `epoch` epochs will write again."""
    _keep(path, lambda line: line["epoch"] <= epoch)


def _keep(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Keeps the lines that are wanted, without any that cannot be read, such as one cut short.

    At every moment the file is the old one or the new one, should the run be killed. Returns the
    last line.
    """
    last: dict[str, Any] = {}
    if path.exists():
        kept: list[bytes] = []
        for line in path.read_bytes().splitlines(keepends=True):
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                if line.endswith(b"\n") and wanted(read := json.loads(line)):
                    kept.append(line)
                    last = read
        with whole(path) as fresh:
            fresh.write_bytes(b"".join(kept))
    return last


def _progress(
    rate: float, learning_rates: Sequence[float], statuses: Mapping[int, Status]
) -> dict[str, float]:
    """Returns what metrics writers get now and then; `rate` in samples per second."""
    metrics = {"samples per second": rate}
    for group, learning_rate in enumerate(learning_rates):
        part = f"/group {group}" if len(learning_rates) > 1 else ""
        metrics[f"learning rate{part}"] = learning_rate
    for rank, status in statuses.items():
        metrics[f"busy share/rank {rank}"] = status.busy
        metrics[f"memory in bytes/rank {rank}"] = status.memory
    return metrics


def table(
    statuses: Mapping[int, Status], workers: Mapping[int, Sequence[Worker]], most: int
) -> Table:
    """Returns a row for each rank, which has these workers; of more than `most`, the first."""
    left_out = len(workers) - most
    # Fits 80 columns, and does not jump with what stands in it.
    shown = Table(
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        caption=f"and {left_out} more" if left_out > 0 else None,
        caption_justify="left",
    )
    headings = ("rank", "stage", "replica", "mini-\nbatch", "forward", "backward", "busy", "memory")
    for heading in headings:
        width = 8 if heading in ("forward", "backward", "memory") else None
        shown.add_column(heading, justify="right", no_wrap=True, min_width=width)
    shown.add_column("waits for", no_wrap=True, min_width=17)
    for rank, own in islice(workers.items(), most):
        cells = _cells(statuses[rank]) if rank in statuses else ["-"] * (len(headings) - 2)
        shown.add_row(str(rank), *stages_and_replicas(own), *cells)
    return shown


def _cells(status: Status) -> list[str]:
    return [
        "-" if status.minibatch is None else str(status.minibatch),
        "-" if status.forward is None else show_seconds(status.forward),
        "-" if status.backward is None else show_seconds(status.backward),
        f"{status.busy:.0%}",
        show_bytes(status.memory),
        _waits(status),
    ]


def _waits(status: Status) -> str:
    if status.waits_for is None:
        return ""
    if status.waiting > 0.5 and status.stuck > _STUCK_SECONDS:
        return f"{status.waits_for} for {status.stuck:.0f} s"
    return f"{status.waits_for} {status.waiting:.0%}"


def in_words(statuses: Mapping[int, Status]) -> str:
    """Returns the busy share of each rank, and who waits longest for whom."""
    if not statuses:
        return ""
    shown = sorted(statuses)[:8]
    text = "; busy " + " ".join(f"{statuses[rank].busy:.0%}" for rank in shown)
    text += " ..." if len(statuses) > len(shown) else ""
    rank = max(statuses, key=lambda rank: statuses[rank].waiting)
    waits = _waits(statuses[rank])
    return text + (f"; rank {rank} waits for {waits}" if waits else "")
