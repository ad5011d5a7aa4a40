"""A process for each rank, forked from this one: it has what this one has imported and made."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
"""For the other ranks to say what they have seen of one that failed."""

_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29


@dataclass(frozen=True)
class Ended:
    """How the processes of the ranks ended: exit codes by rank, negative for signals.

    `seconds` from fork to end of the last, `cpu_seconds` of all ranks together.
    """

    codes: tuple[int, ...]
    seconds: float
    cpu_seconds: float
    late: bool
    """Whether the time was up."""


def run_ranks(ranks: int, body: Callable[[int], int | None], folder: Path, seconds: float) -> Ended:
    """Runs `body(rank)`, which may return an exit code, in a process for each rank.

    What they print goes to `rankN.log` in `folder`. When one fails, or after `seconds`, those that
    are left are killed, as they are when this process is interrupted or dies.
    """
    begin = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    left: dict[int, int] = {}
    codes: dict[int, int] = {}
    spent, give_up = 0.0, begin + seconds
    try:
        for rank in range(ranks):
            left[_fork(partial(body, rank), folder / f"rank{rank}.log")] = rank
        while left and time.monotonic() < give_up:
            for child in list(left):
                done, status, usage = os.wait4(child, os.WNOHANG)
                if done:
                    rank = left.pop(child)
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    spent += usage.ru_utime + usage.ru_stime
                    if codes[rank]:
                        give_up = min(give_up, time.monotonic() + GRACE_SECONDS)
            time.sleep(POLL_SECONDS)
    finally:
        late = bool(left) and not any(codes.values())
        for child in left:
            os.kill(child, signal.SIGKILL)
        for child, rank in left.items():
            _, status, usage = os.wait4(child, 0)
            codes[rank] = os.waitstatus_to_exitcode(status)
            spent += usage.ru_utime + usage.ru_stime
    ordered = tuple(codes[rank] for rank in range(ranks))
    return Ended(ordered, time.monotonic() - begin, spent, late)


def _fork(body: Callable[[], int | None], log: Path) -> int:
    """Returns the process id of the child, which never returns."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _be_a_child(parent, log)
        code = body() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _be_a_child(parent: int, log: Path) -> None:
    """Dies with the parent, is not interrupted in its place, and prints to `log`.

    It wakes up when it asked to, before other programs of this machine, as far as it may.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_TIMERSLACK, 1)  # nanoseconds
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
