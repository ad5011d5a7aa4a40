"""Workers forked off a process that has imported torch, in place of programs started anew.

`pd-train` starts a program for each worker, and most of the seconds that a small run takes are its
imports. Inside `forking` the launcher forks instead; what a worker is given (environment, file
descriptors, process group, signals) is what it would have been given.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from pipedream.runtime.supervise import launch


@contextmanager
def forking() -> Iterator[None]:
    """In here the launcher's workers are forked. For a process that has no other thread."""
    before: Any = launch.subprocess
    launch.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    try:
        yield
    finally:
        launch.subprocess = before  # type: ignore[assignment]


class Child:
    """A forked process that does `work` and ends; subprocess.Popen's words for the rest."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _do(work)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.002)
        assert self.returncode is not None
        return self.returncode


class Forked(Child):
    """A worker, made as the launcher makes them: of a `pd-train` command."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdin: int,
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> None:
        assert (stdin, start_new_session) == (subprocess.DEVNULL, True)

        def work() -> None:
            os.setsid()
            _forget(pass_fds)
            os.environ.clear()
            os.environ.update(env)
            # torch makes its pool of threads anew in the first thread that needs it after a fork;
            # 2.15 aborts now and then if two threads are the first.
            torch.set_num_threads(torch.get_num_threads())
            become(command)

        super().__init__(work)
        while os.getsid(self.pid) != self.pid and self.poll() is None:  # as Popen returns
            time.sleep(0.0005)


def become(command: Sequence[str]) -> None:
    """Is `pd-train ...` from here on."""
    sys.argv = list(command)
    import_module("pipedream.runtime.cli").main(list(command[1:]))


def _forget(pass_fds: Sequence[int]) -> None:
    """What exec would have: handlers of signals, files that are not to be handed on."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in pass_fds:
            with suppress(OSError):
                os.close(int(name))
    launch.subprocess = subprocess
    # Its own is in memory that all forks share: one that is killed with it in hand keeps it.
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.set_lock(threading.RLock())


def _do(work: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
