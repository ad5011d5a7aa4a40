"""Commands with a limit of time, of which nothing is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE = 0.2  # seconds


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends: pd-train and torchrun
    start processes in sessions of their own, which no signal to a group reaches.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_within(
    command: Sequence[str], seconds: float, log: Path, environment: Mapping[str, str]
) -> int | None:
    """Runs a command, whose output goes to `log`, and kills all that it has started when it ends.

    Returns its exit code, or None if it was not done within so many seconds. Call `adopt_orphans`
    first.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=os.environ | dict(environment),
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill_descendants()
            process.wait()


def _kill_descendants() -> None:
    """Kills until there are none: one may start another while it is being killed."""
    while descendants := _descendants(os.getpid()):
        for pid in descendants:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PATIENCE)
        _reap()


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants(root: int) -> list[int]:
    """Returns the processes below `root` that have not ended."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # PID (NAME) STATE PARENT ..., and a name may have spaces and brackets in it.
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found, open_ = list[int](), [root]
    while open_:
        own = children.get(open_.pop(), [])
        found += own
        open_ += own
    return found
