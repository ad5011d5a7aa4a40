"""Programs that take turns on one machine.

Two measurements that are made one after the other differ by what the machine did meanwhile. Here
each program runs for a few seconds and is then stopped while the others have their turn, over and
over: a machine that is slower for a while is slower for all of them.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

TURN = 2.0
"""Seconds."""


def take_turns(commands: Sequence[Sequence[object]]) -> None:
    """Runs all of them to their end. Raises CalledProcessError where one fails."""
    started = [
        subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, start_new_session=True)
        for command in commands
    ]
    try:
        for program in started:
            _signal(program, signal.SIGSTOP)
        for program in itertools.cycle(started):
            if all(each.poll() is not None for each in started):
                break
            if program.poll() is None:
                _have_a_turn(program)
    finally:
        for program in started:
            _signal(program, signal.SIGKILL)
            program.wait()
    for command, program in zip(commands, started, strict=True):
        if program.returncode:
            raise subprocess.CalledProcessError(program.returncode, [str(w) for w in command])


def _have_a_turn(program: subprocess.Popen[bytes]) -> None:
    _signal(program, signal.SIGCONT)
    end = time.monotonic() + TURN
    while time.monotonic() < end and program.poll() is None:
        time.sleep(0.05)
    _signal(program, signal.SIGSTOP)


def _signal(program: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To all of its session: workers that it has started are in process groups of their own."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_text().rpartition(")")[2].split()[3])
            if session == program.pid:
                os.kill(int(stat.parent.name), number)
        except OSError:  # it has ended
            continue
