"""Files as a bad disk, a merge conflict or an enemy leaves them, for each reader of the tools."""

from __future__ import annotations

import io
import random
import re
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from whole_files import STAGE, TENSORS, whole_file

from pipedream.graph.cluster import read_cluster
from pipedream.graph.errors import UserError
from pipedream.graph.measured_run import read_measured
from pipedream.graph.model import read_graph
from pipedream.graph.placements.operators import read_operators
from pipedream.graph.plan import read_plan
from pipedream.graph.profile import read_profile
from pipedream.graph.run_config import read_config
from pipedream.runtime.checkpoint.dcp import Folder
from pipedream.runtime.checkpoint.files import load_all, read_state
from pipedream.runtime.report.live_table import keep_before, keep_until
from pipedream.runtime.report.page.loss_chart import loss_chart
from pipedream.runtime.report.page.run_page import _attempt
from pipedream.runtime.report.recording import read_trace
from pipedream.runtime.run.job import Job
from pipedream.runtime.run.training_segment import Position

LONGEST = 1_000
"""Characters of a message: what it cites of the file is cut."""

SLOWEST = 5.0
"""Seconds of this process; on a machine with other work to do it may wait for much longer."""

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
    """What reads a file of this name; `lenient`: it may not refuse anything. `beside`: whole files
    that it reads, too.
    """

    name: str
    read: Callable[[Path], Any]
    lenient: bool = False
    beside: tuple[str, ...] = ()


def _read_dcp(path: Path) -> None:
    into = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    folder = Folder(path.parent)
    folder.load_model(into)
    folder.load_optimizer(into)


def _read_for_page(path: Path) -> None:
    """As the report of a run does, which leaves out what it cannot read."""
    with redirect_stderr(io.StringIO()) as said:
        _attempt("losses", lambda: loss_chart(path.parent, 4))
    assert said.getvalue().count("\n") <= 1, said.getvalue()
    assert len(said.getvalue()) < LONGEST, said.getvalue()


def _has_summary(path: Path) -> None:
    run: Any = SimpleNamespace(run=path.parent, epochs=2)
    assert isinstance(Job.has_summary.__get__(run), bool)


READERS = {
    "graph.txt": Reader("graph.txt", read_graph),
    "profile.json": Reader("profile.json", read_profile),
    "operators.json": Reader("operators.json", read_operators),
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
    "every_field.yaml": Reader("every_field.yaml", read_config),
    "summary.json": Reader("summary.json", _has_summary, lenient=True),
    "report": Reader("metrics.jsonl", _read_for_page, lenient=True, beside=("held_out.jsonl",)),
    "report, held out": Reader(
        "held_out.jsonl", _read_for_page, lenient=True, beside=("metrics.jsonl",)
    ),
    "model.safetensors.index.json": Reader(
        "model.safetensors.index.json", lambda path: load_all(path.parent), beside=(STAGE,)
    ),
    STAGE: Reader(
        STAGE, lambda path: load_all(path.parent), beside=("model.safetensors.index.json",)
    ),
    ".metadata": Reader(".metadata", _read_dcp, beside=("__0_0.distcp",)),
    "__0_0.distcp": Reader("__0_0.distcp", _read_dcp, beside=(".metadata",)),
}


def read_mutated(reader: Reader, data: bytes, folder: Path) -> str | None:
    """Reads the data. Returns the message if it is refused; raises AssertionError for a message
    that is no single short line, for a slow reader and for one that changes the file.
    """
    path, beside = folder / reader.name, {name: whole_file(name) for name in reader.beside}
    for name, content in {**beside, reader.name: data}.items():
        (folder / name).write_bytes(content)
    begin = time.process_time()
    message = None
    try:
        reader.read(path)
    except UserError as error:
        message = error.format_message()
        assert not reader.lenient, message
        assert "\n" not in message.strip(), message
        assert len(message) < LONGEST, message
        message.encode()  # it can be printed
    assert time.process_time() - begin < SLOWEST, "slow"
    assert reader.lenient or path.read_bytes() == data, "the file was changed"
    for name, content in beside.items():
        assert (folder / name).read_bytes() == content, f"{name} was changed"
    left = {each.name for each in folder.iterdir()}
    assert left == {reader.name, *reader.beside}, "another file was written"
    for name in left:
        (folder / name).unlink()
    return message
