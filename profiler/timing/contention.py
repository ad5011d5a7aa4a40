"""Contention: other processes on the same machine that are at the same work at the same time.

Workers on one machine share its caches, memory bandwidth and power, so a pass takes longer than it
does on an otherwise idle machine. Stages of a pipeline are at different operators of the model;
devices of a mesh are at the same one, so that two which stream through memory have half of it each.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter

from pipedream.graph.errors import UserError

_CONTENDING = "PIPEDREAM_CONTENDING"
"""Environment variable of a contending process."""
_PASSES, _TIMES = "passes", "times"
"""What is told in place of a task: to go on with passes, and to say what they took."""


class TimedPass(NamedTuple):
    """When a pass was half done, by the clock that all processes of a machine share, and seconds
    that it took.
    """

    middle: float
    seconds: float

    @staticmethod
    def ended(end: float, seconds: float) -> TimedPass:
        """Returns the pass that ended then."""
        return TimedPass(end - seconds / 2, seconds)


_PASSES_TOLD = TypeAdapter(list[TimedPass])


@dataclass(frozen=True)
class Contention:
    """The other processes: at passes of the model, but for what is between `begin` and `end`."""

    processes: Sequence[subprocess.Popen[str]] = ()

    def begin(self, task: str) -> None:
        """Has all processes make ready for a task (a line of text), and waits until they are."""
        self._tell(task)
        for process in self.processes:
            _wait(process)

    def go(self) -> None:
        """Has them do the task once."""
        self._tell("")

    def end(self) -> None:
        """Has them go on with passes of the model, after the last task of several."""
        self._tell(_PASSES)
        for process in self.processes:
            _wait(process)

    def beside(self, passes: Sequence[TimedPass]) -> tuple[tuple[float, ...], ...]:
        """Returns for each of the processes what a pass took it at the time of each of these."""
        self._tell(_TIMES)
        told = [_PASSES_TOLD.validate_json(_wait(process)) for process in self.processes]
        middles = [each.middle for each in passes]
        return tuple(_at(middles, other) for other in told if other)

    def _tell(self, line: str) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()


ALONE = Contention()


@contextmanager
def contention(count: int) -> Iterator[Contention]:
    """Runs `count` processes with the same command line inside this context.

    Raises UserError if one of them fails to start its passes.
    """
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "pipedream.profiler.cli", *sys.argv[1:]],
            env={**os.environ, _CONTENDING: "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(count)
    ]
    try:
        for process in started:
            _wait(process)
        yield Contention(started)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise UserError(
            "--workers: one of the other processes could not run the model: there may be"
            " too little memory; give fewer"
        )
    return line


def _at(moments: Sequence[float], passes: Sequence[TimedPass]) -> tuple[float, ...]:
    """Returns what a pass took at these moments, interpolated."""
    middles, seconds = np.array(passes).T
    return tuple(np.interp(moments, middles, seconds).tolist())


def is_contending_process() -> bool:
    """Tells whether `contention` of another process started this one."""
    return _CONTENDING in os.environ


def contend(work: Callable[[], object], made_ready: Callable[[str], Callable[[], object]]) -> None:
    """Repeats `work`, and notes what it takes, until the other process gives a task; then does the
    tasks that it gives, as often as it says, until it has no more; and so on until it is gone.
    `made_ready`: returns what does a task once.
    """
    work()
    _answer()
    do: Callable[[], object] | None = None
    passes: list[TimedPass] = []
    while True:
        while do is None and not select.select([sys.stdin], [], [], 0)[0]:
            begun = time.monotonic()  # nothing is told and not read yet: an answer was waited for
            work()
            end = time.monotonic()
            passes.append(TimedPass.ended(end, end - begun))
        line = sys.stdin.readline()
        if not line:
            return
        task = line.strip()
        if task == _TIMES:
            print(json.dumps(passes), flush=True)
        elif task:
            do = None if task == _PASSES else made_ready(task)
            _answer()
        else:
            assert do is not None
            do()


def _answer() -> None:
    print("ready", flush=True)
