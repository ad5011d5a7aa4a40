"""Keeps the cores of a virtual machine where they are, where one may ask for it.

A core that halts may go on elsewhere: beside another one with which it shares the way to memory, or
alone; the bandwidth of memory that two processes have then changes by half. A core that polls while
it has nothing to do does not halt, and is moved less: of 50 samples of `streaming`, taken between
starts of processes and pauses, 12 began another such time without this, and 2 with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HALTPOLL = Path("/sys/module/haltpoll/parameters")
NANOSECONDS = 4_000_000_000
POLLING = {
    "guest_halt_poll_ns": f"{NANOSECONDS}",
    "guest_halt_poll_grow_start": f"{NANOSECONDS}",
    "guest_halt_poll_allow_shrink": "N",
}


@contextmanager
def awake() -> Iterator[None]:
    """Has the kernel poll for four seconds before a core halts, where it is root's to say."""
    ours = {HALTPOLL / name: value for name, value in POLLING.items()}
    if not all(os.access(each, os.W_OK) for each in ours):
        yield
        return
    before = {each: each.read_text() for each in ours}
    _write(ours)
    try:
        yield
    finally:
        _write(before)


def _write(values: dict[Path, str]) -> None:
    for parameter, value in values.items():
        parameter.write_text(value)
