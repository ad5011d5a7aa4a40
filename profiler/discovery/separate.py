"""Operators are tried in a process of their own, which they may end, or keep for ever.

The process is forked, so that it has the operators that the user's own code has registered.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawValue
from typing import Any, TypeAlias

import torch

from pipedream.capture.programs.trial import CannotTry
from pipedream.graph.placements.operators import Operator, Way
from pipedream.profiler.discovery.search import find_ways

Outcome: TypeAlias = tuple[tuple[Way, ...], str]
"""The ways to divide an operator, or why none was found."""

_SECONDS = 20.0
"""After so many without a word a process is ended."""
_MOST_PROCESSES = 40
"""For one operator; then it is given up."""
_WHOLE = -1
"""The number of the combination while an operator is run whole."""


class _Ended(Exception):
    """Says in words how the process has ended."""


class _Worker:
    """A process that tries operators, the first of them from a combination on."""

    def __init__(self, operators: Sequence[Operator], first: int, seconds: float) -> None:
        context = multiprocessing.get_context("fork")
        self.receiver, sender = context.Pipe(duplex=False)
        self.seconds, self.at = seconds, RawValue("q", _WHOLE)
        work = operators, first, self.at, sender
        self.process = context.Process(target=_try_all, args=work, daemon=True)
        self.process.start()
        sender.close()

    def receive(self) -> Way | str:
        """Returns a way, or why there is no further one. Raises _Ended."""
        if not self.receiver.poll(self.seconds):
            raise _Ended(f"it took longer than {self.seconds:g} s")
        try:
            way, reason = self.receiver.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            raise _Ended(f"it ended the process that tried it (exit code {code})") from None
        return str(reason) if way is None else Way.model_validate_json(way)

    def end(self) -> int:
        """Ends the process; returns the combination that it was at."""
        self.process.kill()
        self.process.join()
        self.receiver.close()
        return int(self.at.value)


def tried(operators: Sequence[Operator], seconds: float = _SECONDS) -> Iterator[Outcome]:
    """Yields the outcome of each operator. Where a combination ends the process, or takes longer
    than so many seconds, the search goes on after it in a new one; an operator that does so when it
    is run whole has no ways.
    """
    worker = _Worker(operators, 0, seconds)
    for number in range(len(operators)):
        ways: dict[Way, None] = {}
        reason: str | None = None
        processes = 0
        while reason is None:
            try:
                received = worker.receive()
            except _Ended as ended:
                at, processes = worker.end(), processes + 1
                given_up = at == _WHOLE or processes == _MOST_PROCESSES
                reason = str(ended) if given_up else None
                rest = operators[number + 1 :] if given_up else operators[number:]
                worker = _Worker(rest, 0 if given_up else at + 1, seconds)
                continue
            if isinstance(received, str):
                reason = received
            else:
                ways[received] = None
        yield tuple(ways), "" if ways else reason or "no part of it is a part of the whole"
    worker.end()


def _try_all(operators: Sequence[Operator], first: int, at: Any, sender: Connection) -> None:
    torch.set_num_threads(1)  # a forked process has none of the threads of its parent
    faulthandler.disable()
    nowhere = os.open(os.devnull, os.O_WRONLY)  # what an operator says as it ends the process
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def begins(number: int) -> None:
        at.value = number

    for operator in operators:
        begins(_WHOLE)
        reason = ""
        try:
            for way in find_ways(operator, first, begins):
                sender.send((way.model_dump_json(), ""))
        except CannotTry as error:
            reason = str(error)
        sender.send((None, reason))
        first = 0
