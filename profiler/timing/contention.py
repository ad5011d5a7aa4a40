"""Contention: other processes on the same machine that run the same model at the same time.

Workers on one machine share its caches, memory bandwidth and power, so a pass takes longer than it
does on an otherwise idle machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipedream.graph.errors import UserError

_PARENT = "PIPEDREAM_CONTENDING_WITH"
"""Environment variable of a contending process: the process id of its parent."""


@contextmanager
def contention(count: int) -> Iterator[None]:
    """Runs `count` processes with the same command line inside this context.

    Raises UserError if one of them fails to start its passes.
    """
    environment = {**os.environ, _PARENT: str(os.getpid())}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "pipedream.profiler.cli", *sys.argv[1:]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(count)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise UserError(
                    "--workers: one of the other processes could not run the model: there may be"
                    " too little memory; give fewer"
                )
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def is_contending_process() -> bool:
    """Tells whether `contention` of another process started this one."""
    return _PARENT in os.environ


def run_contending_passes(work: Callable[[], object]) -> None:
    """Repeats `work` until the parent process kills this one or is gone."""
    work()
    print("at work", flush=True)
    while str(os.getppid()) == os.environ[_PARENT]:
        work()
