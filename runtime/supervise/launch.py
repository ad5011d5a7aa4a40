"""The launcher of pd-train: forks off one process per worker on this machine, and watches them."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count as count_from_0
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from pipedream.comm.rank_info import LOCALHOST, RESTARTS, RankInfo, free_port
from pipedream.runtime.supervise.forked import Forked
from pipedream.runtime.supervise.heartbeat import Heartbeats

USER_ERROR = 2
"""Exit code of a worker whose cause the user can mend: a line that needs no more words."""

STOPPED = 77
"""Exit code of a worker of `spawn` that has saved and left because it was asked to. Not 130, as the
run's own: a worker that SIGINT alone has reached ends with that, and has saved nothing."""

RETUNED = 78
"""Exit code of a worker that has saved and left to be started again under another plan."""

PEER_LOST = 75
"""Exit code of a worker that stops, quietly, only because another one is gone."""

DATA_LOST = 76
"""Exit code of a worker that has lost a process that reads its data."""

ASKING = (signal.SIGINT, signal.SIGUSR1)
"""For ranks that `spawn` did not start: Ctrl-C under torchrun, and what mpirun and srun pass on.
SIGTERM is not one of them: torchrun ends with it the ranks that are left when one has died."""

Work: TypeAlias = Callable[[RankInfo, Heartbeats], int]
"""What a worker does, with the exit code that it returns."""

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0
_LEAVING_SECONDS = 1.0
"""For those who have lost one that failed: they end by themselves, and first say so to the writers
of the run's metrics.
"""
_NOTICE_SECONDS = 0.5  # until a heartbeat that stands still has been seen to
_CAUSE_SECONDS = 2.0  # torchrun looks every 0.1 s
_SAVING = (*ASKING, signal.SIGTERM)  # Ctrl-C, and what cluster managers send


def spawn(
    work: Work,
    workers: int,
    timeout: float = math.inf,
    restarts: int = 0,
    with_fewer: bool = False,
) -> int:
    """Does `work` once per worker, each in a fork of this process. Returns the exit code.

    0 if all went well. If a worker dies, or its heartbeat or its GPU stands still for `timeout`
    seconds, all others are stopped and one line names the rank, the cause, and what it was doing;
    for an error of the user the line is the worker's own, and the code is 2. All workers are else
    started again, at most `restarts` times; then, `with_fewer`, as often with one less. Those that
    have left to go on under another plan are started again in any case.

    SIGINT, SIGTERM and SIGUSR1 stop all workers, the first one after they have saved; SIGHUP stops
    them at once. No worker outlives this process, even if it is killed. Each has the variables that
    torchrun would give it, and its share of the cores as OMP_NUM_THREADS, unless that is set.
    """
    end: _End | None = None
    with _catching_signals() as caught:
        begun = count_from_0()
        for count, how in _starts(workers, restarts, with_fewer):
            if end is not None:
                _say(end, how)
            end = _run(work, count, next(begun), timeout, caught)
            while end.again and not caught:
                end = _run(work, count, next(begun), timeout, caught)
            if end.words is None:
                return end.code
            if end.final or caught:
                break
    assert end is not None
    nobody = with_fewer and not end.final
    _say(end, "no worker is left to plan for" if nobody else "all workers stopped")
    return end.code


def _starts(workers: int, restarts: int, with_fewer: bool) -> Iterator[tuple[int, str]]:
    """Yields each start to try: how many workers, and words that describe it."""
    for count in range(workers, 0, -1) if with_fewer else (workers,):
        yield count, f"going on with {count} worker{'s' * (count > 1)}"
        for restart in range(restarts):
            yield count, f"restart {restart + 1} of {restarts}"


def _say(end: _End, then: str) -> None:
    print(f"pd-train: {end.words}; {then}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _End:
    """How the workers ended: the exit code of the run, and in `words` what to tell the user.

    `final` if starting them again would not help, `again` if they have left for that.
    """

    code: int
    words: str | None = None
    final: bool = False
    again: bool = False


def _run(work: Work, workers: int, attempt: int, timeout: float, caught: Sequence[int]) -> _End:
    """Starts all workers once; stops the rest when one has failed."""
    parent_death_pipe, port = os.pipe(), free_port()
    heartbeats = Heartbeats.make(workers)
    children: list[Forked] = []
    try:
        for rank in range(workers):
            rank_info = RankInfo(rank, workers, rank, workers, LOCALHOST, port)
            begin = partial(_begin, work, rank_info, attempt, heartbeats, parent_death_pipe)
            try:
                children.append(Forked(begin))
            except OSError as error:
                return _End(1, f"rank {rank} cannot be started: {error.strerror}")
        end = _watch(children, caught, heartbeats, timeout)
        if not caught:
            _await(children, _LEAVING_SECONDS)
        return end
    finally:
        _stop(children)
        for descriptor in parent_death_pipe:
            os.close(descriptor)


def _begin(
    work: Work,
    rank_info: RankInfo,
    attempt: int,
    heartbeats: Heartbeats,
    parent_death_pipe: tuple[int, int],
) -> int:
    """Does the work of a worker, with a heartbeat, and not longer than its parent lives."""
    _die_with_parent(*parent_death_pipe)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_each(rank_info.world_size)))
    os.environ.update(rank_info.variables() | {RESTARTS: str(attempt)})
    heartbeats.start_beating(rank_info.rank)
    return work(rank_info, heartbeats)


def threads_each(workers: int) -> int:
    """Returns the share of each worker in the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


def _watch(
    children: Sequence[Forked],
    caught: Sequence[int],
    heartbeats: Heartbeats,
    timeout: float,
) -> _End:
    """Waits until all workers are done or one has failed."""
    ages = _HeartbeatAges(heartbeats, len(children), timeout)
    lost_since: float | None = None
    while True:
        codes = [child.poll() for child in children]
        if caught and not _may_save(caught, heartbeats):
            return _End(128 + caught[-1], _got(caught[-1]), final=True)
        saved = (STOPPED, RETUNED)
        failed = {rank: code for rank, code in enumerate(codes) if code and code not in saved}
        causes = {rank: code for rank, code in failed.items() if code != PEER_LOST}
        if causes:
            return _failed(*next(iter(causes.items())), heartbeats)
        still = ages.too_old(rank for rank, code in enumerate(codes) if code is None)
        if still is not None:
            words = f"has not responded for {timeout:g} s{_at(heartbeats, still)}"
            return _End(1, f"rank {still} {words}")
        hangs = _hangs(heartbeats, codes)
        if hangs is not None:
            return _End(1, hangs)
        if failed:
            # Whoever they have lost is about to be seen; if nobody dies, they are the news.
            lost_since = lost_since or time.monotonic()
            if None not in codes or time.monotonic() - lost_since > _GRACE_SECONDS:
                silent = [rank for rank, code in enumerate(codes) if code is None]
                return _cut_off(list(failed), silent, heartbeats)
        elif None not in codes:
            return _saved(codes, caught)
        time.sleep(_POLL_SECONDS)


def _saved(codes: Sequence[int | None], caught: Sequence[int]) -> _End:
    """Returns the end of workers of which none has failed."""
    if RETUNED in codes and not caught:
        return _End(0, again=True)
    stopped = STOPPED in codes or RETUNED in codes
    return _End(128 + (caught[0] if caught else signal.SIGINT) if stopped else 0)


def _may_save(caught: Sequence[int], heartbeats: Heartbeats) -> bool:
    """Returns whether the workers get time to save: at the first signal, if they train by then."""
    if len(caught) > 1 or caught[0] not in _SAVING or not heartbeats.of(0).words:
        return False
    if not heartbeats.stop_requested:
        heartbeats.request_stop()
        print(f"pd-train: {draining(caught[0])}", file=sys.stderr, flush=True)
    return True


def draining(number: int) -> str:
    """Describes what a run does at the first signal of that number."""
    again = "Ctrl-C again" if number == signal.SIGINT else "once more"
    return f"{_got(number)}; draining the pipeline and saving; {again} to leave at once"


class _HeartbeatAges:
    """Since when each rank's heartbeat has stood still, once the rank has reported what it does.

    Before that it imports libraries, which can block all of its threads for seconds.
    """

    def __init__(self, heartbeats: Heartbeats, workers: int, timeout: float) -> None:
        self.heartbeats = heartbeats
        self.seconds = max(timeout - _NOTICE_SECONDS, timeout / 2)
        self.seen = [(0, math.inf)] * workers

    def too_old(self, ranks: Iterable[int]) -> int | None:
        """Returns the first of the ranks whose heartbeat has stood still for too long."""
        now = time.monotonic()
        for rank in ranks:
            count, since = self.seen[rank]
            beat = self.heartbeats.of(rank)
            if beat.count != count or not beat.words:
                self.seen[rank] = (beat.count, now)
            elif now - since > self.seconds:
                return rank
        return None


def _hangs(heartbeats: Heartbeats, codes: Sequence[int | None]) -> str | None:
    """Names the first rank at work that says its GPU stands still."""
    at_work = (rank for rank, code in enumerate(codes) if code is None)
    found = ((rank, heartbeats.of(rank).hangs) for rank in at_work)
    return next((f"rank {rank} {words}" for rank, words in found if words), None)


def _at(heartbeats: Heartbeats, rank: int) -> str:
    """Returns what the rank was doing, and why it has failed, as far as it has said so."""
    last = heartbeats.of(rank)
    return f" {last.words}" * bool(last.words) + f" ({last.cause})" * bool(last.cause)


def _failed(rank: int, code: int, heartbeats: Heartbeats) -> _End:
    if code == USER_ERROR:
        if cause := heartbeats.of(rank).cause:
            print(f"pd-train: {cause}", file=sys.stderr, flush=True)
        return _End(USER_ERROR)
    how = f"failed with exit code {code}"
    if code == DATA_LOST:
        how = "lost a process that reads its data (data_workers)"
    elif code < 0:
        how = f"was killed by {_name(-code)}"
    return _End(1, f"rank {rank} {how}{_at(heartbeats, rank)}")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _cut_off(noticed: Sequence[int], silent: Sequence[int], heartbeats: Heartbeats) -> _End:
    """Returns the end where nobody has died: blames the rank that most have lost, or the only one
    that has noticed nothing, or else the first that has lost another.
    """
    missed = (heartbeats.of(rank).lost for rank in noticed)
    lost = Counter(rank for rank in missed if rank is not None)
    ranked = lost.most_common(2)
    if ranked and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]):
        rank = ranked[0][0]
    elif len(silent) == 1:
        (rank,) = silent
    else:
        rank = noticed[0]
        return _End(1, f"rank {rank} lost its connection to the others{_at(heartbeats, rank)}")
    return _End(1, f"rank {rank} no longer responds to the other ranks{_at(heartbeats, rank)}")


def _got(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else f"got {_name(number)}"


def _stop(children: Sequence[Forked]) -> None:
    """Stops all workers and what they started: first with SIGTERM, then with SIGKILL."""
    for child in children:
        child.signal_all(signal.SIGTERM)
    _await(children, _GRACE_SECONDS)
    for child in children:
        child.signal_all(signal.SIGKILL)
    for child in children:
        child.wait()


def _await(children: Sequence[Forked], seconds: float) -> None:
    """Returns when all have ended, or after so many seconds."""
    deadline = time.monotonic() + seconds
    with suppress(subprocess.TimeoutExpired):
        for child in children:
            child.wait(max(0.0, deadline - time.monotonic()))


@contextmanager
def _catching_signals() -> Iterator[Sequence[int]]:
    """Collects the signals that ask this process to stop, instead of stopping."""
    caught: list[int] = []

    def catch(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    asked = (*_SAVING, signal.SIGHUP)
    before = [signal.signal(number, catch) for number in asked]
    try:
        yield caught
    finally:
        for number, handler in zip(asked, before, strict=True):
            signal.signal(number, handler)


def _die_with_parent(reading_end: int, writing_end: int) -> None:
    """Ends this worker, and what it started, when its parent is gone.

    The parent holds the writing end of the pipe and never writes: reading returns when it has died,
    for whatever reason.
    """
    os.close(writing_end)

    def watch() -> None:
        os.read(reading_end, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-death", daemon=True).start()


def code_of_stopped() -> int:
    """Returns the exit code of a worker that `spawn` did not start and that has saved and stopped.

    torchrun treats everything but 0 as a failure and would start it again.
    """
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else 128 + signal.SIGINT


def record_error(error: BaseException | str, heartbeats: Heartbeats | None = None) -> None:
    """Says why this worker fails to whoever started it: an exception, or a line that says it all.

    The launcher of pd-train, if there are `heartbeats`, has the line from there. torchrun cites it
    in its summary, from a file such as `record` of torch.distributed.elastic writes.
    """
    line = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    if heartbeats is not None:
        heartbeats.report_cause(int(os.environ["RANK"]), line.partition("\n")[0])
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        trace = line if isinstance(error, str) else "".join(traceback.format_exception(error))
        extra = {"py_callstack": trace, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def let_the_cause_show() -> None:
    """Waits, so that the launcher first sees who has died, then those that only noticed."""
    time.sleep(_CAUSE_SECONDS)
