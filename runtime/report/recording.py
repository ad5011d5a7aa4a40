"""When each action of a run was done: kept by each rank, brought together on rank 0."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pipedream.graph.command import whole
from pipedream.graph.errors import UserError, read_text
from pipedream.graph.timeline import Event, Timeline, draw, write_chrome
from pipedream.runtime.report.clock import Clock
from pipedream.runtime.report.utilisation import in_flight, versions
from pipedream.schedule.action import parse_action

SentEvents: TypeAlias = list[tuple[int, list[tuple[str, float, float]]]]
"""For each epoch its number, and of each action its text, begin and end."""


_HEADER = ["rank", "action", "begin_seconds", "end_seconds"]

KEPT = 1_000
"""Minibatches of the last epoch. Their events are some ten for each, on every rank."""


class Recorder:
    """The events of this rank: of every epoch, or of the end of the last one alone.

    That end begins with a multiple of `unit` minibatches, where all stages have made whole updates.
    """

    def __init__(self, clock: Clock, every_epoch: bool, unit: int = 1) -> None:
        self.clock, self.every_epoch, self.unit = clock, every_epoch, unit
        self.epochs: dict[int, Sequence[Event]] = {}
        self.crowded = 0

    def first(self, minibatches: int) -> int:
        """Returns the first minibatch of an epoch of so many that is kept."""
        return 0 if self.every_epoch else max(0, minibatches - KEPT) // self.unit * self.unit

    def begin(self) -> None:
        """An epoch begins: if not all are kept, the last one goes."""
        self.crowded = 10 * KEPT
        if not self.every_epoch:
            self.epochs.clear()

    def thin_out(self, events: list[Event]) -> None:
        """Now and then forgets those that will not be kept, while the epoch goes on."""
        if not self.every_epoch and len(events) > self.crowded:
            oldest = self.first(events[-1].action.minibatch)
            del events[: next(i for i, e in enumerate(events) if e.action.minibatch >= oldest)]
            self.crowded = 2 * len(events) + 10 * KEPT

    def add(self, epoch: int, events: Sequence[Event], minibatches: int) -> None:
        """Keeps the events of an epoch of so many minibatches."""
        first = self.first(minibatches)
        self.epochs[epoch] = [event for event in events if event.action.minibatch >= first]

    def sent(self) -> SentEvents:
        """Returns all events, in rank 0's time. Call after the final clock reading."""
        common = self.clock.common
        return [
            (epoch, [(str(e.action), common(e.begin), common(e.end)) for e in events])
            for epoch, events in self.epochs.items()
        ]


@dataclass(frozen=True)
class Recording:
    """The events of all ranks for each epoch, in seconds from the first of them."""

    epochs: Mapping[int, Timeline]

    @staticmethod
    def of(sent: Sequence[SentEvents]) -> Recording:
        """Returns the recording of what the ranks sent, in their order."""
        begins = (begin for epochs in sent for _, events in epochs for _, begin, _ in events[:1])
        origin = min(begins, default=0.0)
        timelines: dict[int, dict[int, Sequence[Event]]] = {}
        for rank, epochs in enumerate(sent):
            for epoch, events in epochs:
                timelines.setdefault(epoch, {})[rank] = [
                    Event(parse_action(text), begin - origin, end - origin)
                    for text, begin, end in events
                ]
        return Recording(timelines)

    def write_last(self, folder: Path) -> None:
        """Writes timeline.csv, .json and .png: the end of the last epoch."""
        last = self.epochs[max(self.epochs)] if self.epochs else {}
        write_trace(last, folder / "timeline.csv")
        write_chrome(last, folder / "timeline.json", _counters(last))
        draw(last, folder / "timeline.png", f"{folder.name}: last epoch")

    def write_all(self, path: Path) -> None:
        """Writes every epoch, one after the other, as JSON for Perfetto."""
        ranks = sorted({rank for epoch in self.epochs.values() for rank in epoch})
        joined = {
            rank: [e for epoch in self.epochs.values() for e in epoch[rank]] for rank in ranks
        }
        marks = {
            f"epoch {number}": min(events[0].begin for events in epoch.values() if events)
            for number, epoch in self.epochs.items()
            if any(epoch.values())
        }
        write_chrome(joined, path, _counters(joined), marks)


def _counters(ranks: Timeline) -> dict[str, dict[int, list[tuple[float, float]]]]:
    counted: dict[str, Any] = {"minibatches in flight": in_flight, "weight versions": versions}
    return {
        name: {rank: count(events) for rank, events in ranks.items()}
        for name, count in counted.items()
    }


def write_trace(ranks: Timeline, path: Path) -> None:
    """Writes a CSV line for each event: rank, action as `2F0`, begin and end in seconds."""
    with whole(path) as fresh, fresh.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_HEADER)
        for rank, events in sorted(ranks.items()):
            for event in events:
                writer.writerow([rank, event.action, f"{event.begin:.9f}", f"{event.end:.9f}"])


def read_trace(path: Path) -> dict[int, list[Event]]:
    """Returns what `write_trace` wrote. Raises UserError `FILE:LINE: what is wrong`."""
    ranks: dict[int, list[Event]] = {}
    header, *lines = read_text(path).splitlines() or [""]
    if header != ",".join(_HEADER):
        raise UserError(f"{path}:1: expected the columns {','.join(_HEADER)}")
    for number, line in enumerate(lines, start=2):
        try:
            rank, action, begin, end = line.split(",")
            event = Event(parse_action(action), float(begin), float(end))
            ranks.setdefault(int(rank), []).append(event)
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}") from error
    return ranks
