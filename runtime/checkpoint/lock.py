"""One run at a time in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pipedream.graph.errors import UserError


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Creates the folder and keeps other runs out of it until the block or this process ends.

    Processes forked from this one do not inherit the lock. Raises UserError if another process
    holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", blocking=False)
    try:
        with lock:
            yield
    except Timeout as error:
        raise UserError(
            f"-o {folder}: another run is at work in this folder; wait, or give another folder"
        ) from error
