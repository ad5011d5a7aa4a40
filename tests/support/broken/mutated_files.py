"""Files as a bad disk, a merge conflict or an enemy leaves them, for each reader of the tools."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedream.graph.cluster import read_cluster
from pipedream.graph.errors import UserError
from pipedream.graph.measured_run import read_measured
from pipedream.graph.model import read_graph
from pipedream.graph.plan import read_plan
from pipedream.graph.profile import read_profile
from pipedream.graph.run_config import read_config
from pipedream.runtime.checkpoint.files import read_state
from pipedream.runtime.engine.training_segment import Position
from pipedream.runtime.report.live_table import keep_before, keep_until
from pipedream.runtime.report.recording import read_trace

LONGEST = 1_000
"""Characters of a message: what it cites of the file is cut."""

SLOWEST = 5.0
"""Seconds."""

_TOKENS = (
    *(b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b'"\\ud800"', b"\\u0000", b"\r", b"\n", b"\t"),
    *(b"{", b"}", b"[", b"]", b'"', b"'", b":", b",", b"-", b"#", b" -- ", b"; "),
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"0x10", b"1_000", b".inf"),
    *(b"9" * 5000, b"[" * 5000, b'{"a":' * 2000, b"? [a, b]\n: c\n", b"{[1]: 2}", b"{{a}: b}"),
    *(b"&a [*a]", b"<<: *a", b"!!python/object/apply:os.system [touch /tmp/harm]", b"%YAML 9.9\n"),
    *(b"!!timestamp 2001-99-99", b"!!binary x", b"!!set {a, b}", b"!!omap [a: 1]", b"2024-13-45"),
    *("\u0661\u0662".encode(), "\u00b2".encode(), "\u2028".encode(), b"__import__('os')"),
    *(b"../../harm", b"/harm", b"$(touch harm)", b"{0.__class__}", b"%s%n", b"\x1b[2J"),
)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The data changed in one to three places."""
    for _ in range(draw.randint(1, 3)):
        data = draw.choice(_CHANGES)(data, draw)
    return data


def _span(data: bytes, draw: random.Random, longest: int) -> tuple[int, int]:
    begin = draw.randint(0, len(data))
    return begin, min(len(data), begin + draw.randint(0, longest))


def _flipped(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]


def _removed(data: bytes, draw: random.Random) -> bytes:
    begin, end = _span(data, draw, 40)
    return data[:begin] + data[end:]


def _cut_short(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randint(0, len(data))]


def _doubled(data: bytes, draw: random.Random) -> bytes:
    begin, end = _span(data, draw, 200)
    return data[:end] + data[begin:]


def _moved(data: bytes, draw: random.Random) -> bytes:
    (begin, end), to = _span(data, draw, 100), draw.randint(0, len(data))
    return data[:to] + data[begin:end] + data[to:]


def _inserted(data: bytes, draw: random.Random) -> bytes:
    at = draw.randint(0, len(data))
    return data[:at] + draw.choice(_TOKENS) + data[at:]


def _replaced(data: bytes, draw: random.Random) -> bytes:
    """A number or a word gives way to something else."""
    words = list(re.finditer(rb"-?[\d.]+|\w+", data))
    if not words:
        return _inserted(data, draw)
    word = draw.choice(words)
    return data[: word.start()] + draw.choice(_TOKENS) + data[word.end() :]


def _exchanged(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    a, b = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return b"\n".join(lines)


_CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_flipped, _removed, _cut_short, _doubled, _moved, _inserted, _replaced, _replaced),
    _exchanged,
)


@dataclass(frozen=True)
class Reader:
    """What reads a file of this name; `lenient`: it may not refuse anything."""

    name: str
    read: Callable[[Path], Any]
    lenient: bool = False


READERS = {
    "graph.txt": Reader("graph.txt", read_graph),
    "profile.json": Reader("profile.json", read_profile),
    "plan.json": Reader("plan.json", read_plan),
    "measured.json": Reader("measured.json", read_measured),
    "cluster.yaml": Reader("cluster.yaml", read_cluster),
    "run.yaml": Reader("run.yaml", read_config),
    "state.json": Reader("state.json", lambda path: read_state(path.parent)),
    "timeline.csv": Reader("timeline.csv", read_trace),
    "metrics.jsonl": Reader(
        "metrics.jsonl", lambda path: keep_before(path, Position(1, 3)), lenient=True
    ),
    "held_out.jsonl": Reader("held_out.jsonl", lambda path: keep_until(path, 1), lenient=True),
}


def read_mutated(reader: Reader, data: bytes, folder: Path) -> str | None:
    """Reads the data. Returns the message if it is refused; raises AssertionError for a message
    that is no single short line, for a slow reader and for one that changes the file.
    """
    path = folder / reader.name
    path.write_bytes(data)
    begin = time.monotonic()
    message = None
    try:
        reader.read(path)
    except UserError as error:
        message = error.format_message()
        assert not reader.lenient, message
        assert "\n" not in message.strip(), message
        assert len(message) < LONGEST, message
        message.encode()  # it can be printed
    assert time.monotonic() - begin < SLOWEST, "slow"
    assert reader.lenient or path.read_bytes() == data, "the file was changed"
    assert [each.name for each in folder.iterdir()] == [reader.name], "another file was written"
    path.unlink()
    return message
