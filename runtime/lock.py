"""One run at a time in a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipedream.graph.command import UserError


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
        yield
