"""How far a measurement is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

Step: TypeAlias = Callable[[str, float, float], None]
"""Call it with what goes on, and how much of how much is done; of 0 where nobody knows."""

_EVERY_SECONDS = 20.0
"""So that a log tells of minutes, and a short measurement leaves no line."""


def progress() -> AbstractContextManager[Step]:
    """Shows progress on stderr, as what is measured may go to a file."""
    return _bar() if sys.stderr.isatty() else _lines(_EVERY_SECONDS)


@contextmanager
def _bar() -> Iterator[Step]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total or None
        )


@contextmanager
def _lines(every: float) -> Iterator[Step]:
    """Writes lines from a thread: loading or one pass of a large model may itself take minutes."""
    began, now, over = time.monotonic(), ["starting"], threading.Event()

    def step(what: str, done: float, total: float) -> None:
        now[0] = f"{what}, {done / total:.0%}" if total else what

    def tell() -> None:
        while not over.wait(every):
            seconds = time.monotonic() - began
            print(f"pd-profile: {now[0]} after {seconds:.0f} s", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield step
    finally:
        over.set()
        teller.join()
