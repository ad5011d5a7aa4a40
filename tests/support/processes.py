"""Runs a function in several real processes, with a time limit and nothing left behind."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """One that nobody has, nor is given before it is used: below those that connections get by
    themselves, and from a block that this process alone gives ports from.
    """
    first, _ = _block()
    for port in itertools.islice(_PORTS, _BLOCK):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", first + port))
            return first + port
    raise AssertionError("no port is free")


@cache
def _block() -> tuple[int, socket.socket]:
    """The first port of a block, which is kept bound: a sign for others, in other runs of the tests
    on this machine, too.
    """
    for first in range(10_000, 32_000, _BLOCK):
        guard = socket.socket()
        with suppress(OSError):
            guard.bind(("127.0.0.1", first))
            return first, guard
        guard.close()
    raise AssertionError("no block of ports is free")


_BLOCK = 200

_PORTS = itertools.cycle(range(1, _BLOCK))


def run_processes(
    function: Callable[..., Any],
    processes: int,
    *args: Any,
    seconds: float = 100.0,
    fork: bool = False,
) -> list[Any]:
    """`function(rank, processes, *args)` in each process; what each returned, by rank.

    Fails with the first traceback, or when time is up; then every process is killed. With `fork`
    they are forked off this one, and know what it knows.
    """
    context = multiprocessing.get_context("fork") if fork else warm_context()
    answers = context.SimpleQueue()
    workers = [
        context.Process(target=_work, args=(answers, function, rank, processes, args))
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + seconds
    try:
        while len(results) < processes:
            if answers.empty():
                assert time.monotonic() < deadline, f"time is up; done: {sorted(results)}"
                time.sleep(0.01)
                continue
            rank, failure, result = answers.get()
            assert failure is None, f"rank {rank}:\n{failure}"
            results[rank] = result
    finally:
        for worker in workers:
            if len(results) < processes:
                worker.kill()
            worker.join()
    return [results[rank] for rank in range(processes)]


def warm_context() -> multiprocessing.context.ForkServerContext:
    """A server that has imported and done once what every worker would have to.

    Before Python 3.12.4 it looks for modules on PYTHONPATH alone, whatever sys.path it is given.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    before = os.environ.get("PYTHONPATH")
    # The root, for what a test module itself gives to be run: it is `tests.FOLDER.NAME` by name.
    if (root := str(Path(__file__).parents[2])) not in sys.path:
        sys.path.append(root)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # pd-train sets it before it imports torch, which reads it only then.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def _work(
    answers: Any, function: Callable[..., Any], rank: int, processes: int, args: tuple[Any, ...]
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # forked ones outlive nobody
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    try:
        answers.put((rank, None, function(rank, processes, *args)))
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
