"""The events of a run as text: a CSV line for each."""

from __future__ import annotations

import csv
from pathlib import Path

from pipedream.graph.errors import UserError
from pipedream.graph.timeline import Event, Timeline
from pipedream.schedule.action import parse_action

_HEADER = ["rank", "action", "begin_seconds", "end_seconds"]


def write_trace(ranks: Timeline, path: Path) -> None:
    """A CSV line for each event: rank, action as `2F0`, begin and end in seconds."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_HEADER)
        for rank, events in sorted(ranks.items()):
            for event in events:
                writer.writerow([rank, event.action, f"{event.begin:.9f}", f"{event.end:.9f}"])


def read_trace(path: Path) -> dict[int, list[Event]]:
    """What `write_trace` wrote. Raises UserError `FILE:LINE: what is wrong`."""
    ranks: dict[int, list[Event]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        if next(reader, None) != _HEADER:
            raise UserError(f"{path}:1: expected the columns {','.join(_HEADER)}")
        for row in reader:
            try:
                rank, action, begin, end = row
                event = Event(parse_action(action), float(begin), float(end))
                ranks.setdefault(int(rank), []).append(event)
            except ValueError as error:
                raise UserError(f"{path}:{reader.line_num}: {error}") from error
    return ranks
