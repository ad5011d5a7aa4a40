"""Other workers of the same machine: processes that do passes of the same model meanwhile.

Workers on one machine share its caches, its memory's bandwidth and its power. What a pass takes
while the other cores idle is less than what it will take in a run that gives each a worker.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from pipedream.graph.errors import UserError

_PARENT = "PIPEDREAM_CONTENDING_WITH"
"""In the environment of such a process: whose it is."""


@contextmanager
def contention(count: int) -> Iterator[None]:
    """`count` processes that were told what this one was are at work in here.

    Raises UserError where one of them does not get that far.
    """
    environment = {**os.environ, _PARENT: str(os.getpid())}
    started = [_another(environment) for _ in range(count)]
    try:
        for process in started:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise UserError(
                    "--workers: a process beside this one could not do the same: there may be too"
                    " little memory; give fewer"
                )
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _another(environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pipedream.profiler.cli", *sys.argv[1:]],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def is_contending_process() -> bool:
    return _PARENT in os.environ


def run_contending_passes(work: Callable[[], object]) -> None:
    """Does this until whoever is accompanied has had enough, or is gone."""
    work()
    print("at work", flush=True)
    while str(os.getppid()) == os.environ[_PARENT]:
        work()
