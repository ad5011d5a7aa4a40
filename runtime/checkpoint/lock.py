"""One run at a time in a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pipedream.graph.errors import UserError

_files: set[TextIO] = set()


def _let_go() -> None:
    """A process that this one forks shares its locks, and may outlive it: one that reads data."""
    for file in _files:
        file.close()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps other runs out of the folder; the system lets go of it when this process ends.

    Raises UserError where another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"-o {folder}: another run is at work in this folder; wait, or give another folder"
            ) from error
        _files.add(file)
        try:
            yield
        finally:
            _files.discard(file)
