"""A process forked off this one, in a session of its own, with what this one has imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_SECONDS_BETWEEN_LOOKS = 0.002


class Forked:
    """Does `work` and ends with the exit code that it returns; the words are those of Popen.

    Only for a process without other threads of Python: they would be missing in the fork. Raises
    OSError.
    """

    def __init__(self, work: Callable[[], int | None]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()  # else both would print what is still to be printed
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _CAUGHT)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _begin(before)
                _do(work)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while os.getsid(self.pid) != self.pid and self.poll() is None:
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while the process is there."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Raises TimeoutExpired of subprocess."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        assert self.returncode is not None
        return self.returncode

    def signal_all(self, number: int) -> None:
        """Sends a signal to the process and to all that it has started, if it is there no more."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _begin(mask: set[int | signal.Signals]) -> None:
    """Leaves what belongs to the parent: its terminal, its input, and what it does at signals."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in _CAUGHT:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _do(work: Callable[[], int | None]) -> NoReturn:
    """Never returns: above it are the parent's calls."""
    code = 1
    try:
        code = work() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
