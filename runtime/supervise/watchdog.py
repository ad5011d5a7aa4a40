"""Ranks watch one another where pd-train's launcher and its heartbeats are missing.

Under torchrun and mpirun nobody notices that a rank was stopped: it neither dies nor answers. So
each rank writes to the store every second what it does, and watches its neighbour, the rank before
it in a ring. A rank whose neighbour stands still leaves a message for all, and so does one whose
GPU does. Time is counted only while a rank runs itself: one that was stopped and continues has not
seen the others stand still.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from pipedream.comm.messages import PeerLost
from pipedream.comm.rank_info import RankInfo
from pipedream.runtime.supervise.launch import PEER_LOST, record_error

_LOST = "watchdog/lost"
_LONGEST_BEAT = 1.0
_BEATS = 20  # to a timeout, at least
_EARLIER = 10  # beats; gloo gives up after the timeout, and knows less
_UNTIL_ALL_HAVE_HEARD = 4  # beats


@dataclass
class Watchdog:
    """Calls `lost` with a message, from a thread, if a rank stands still for nearly `timeout` s.

    `store`: a connection of its own, since a waiting call blocks all other threads. The rank that
    serves the store (`host`, None if the launcher does) is missed when the store is silent.
    """

    store: Store
    rank: int
    ranks: int
    timeout: float
    host: int | None
    lost: Callable[[str], None]

    @staticmethod
    def of(store: Store, rank_info: RankInfo, timeout: float) -> Watchdog | None:
        """Returns the watchdog that ends this process if another is lost; None if alone."""

        def leave(line: str) -> None:
            print(f"pd-train: rank {rank_info.rank}: {line}", file=sys.stderr, flush=True)
            time.sleep(_UNTIL_ALL_HAVE_HEARD * _beat(timeout))
            record_error(line)
            os._exit(PEER_LOST)

        if rank_info.world_size == 1:
            return None
        host = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        own: Store = store.clone()  # type: ignore[attr-defined]
        return Watchdog(own, rank_info.rank, rank_info.world_size, timeout, host, leave)

    def __post_init__(self) -> None:
        self.seconds = _beat(self.timeout)
        self.most = self.timeout - _EARLIER * self.seconds
        self.neighbour = (self.rank - 1) % self.ranks
        self.words, self.silence, self.announced = "", 0.0, False
        # Says what is wrong with this rank's GPU, if anything is.
        self.look: Callable[[float], str | None] = lambda seconds: None
        # What others do, in words; empty before and after training.
        self.activities: dict[int, str] = {}
        self.ended = threading.Event()
        self.talking = threading.Thread(target=self._talk, name="watchdog", daemon=True)
        self.talking.start()
        if self.host not in (None, self.rank):
            threading.Thread(target=self._listen, name="silence", daemon=True).start()

    def say(self, words: str) -> None:
        """Sets what this rank does from now on, in words."""
        first, self.words = not self.words, words
        if first:  # at once: until then it counts as not yet at work
            self._show(0)

    def end(self) -> None:
        """Called when nobody needs this rank any more."""
        self.words = ""
        self.ended.set()
        self.talking.join(self.seconds)

    def explained(self, error: PeerLost) -> str:
        """Returns the error with what the lost rank was doing when last seen.

        Does not return if a thread has just reported more, and is about to end this process.
        """
        while self.announced:
            time.sleep(self.seconds)
        words = None
        if error.peer is not None:
            with suppress(RuntimeError):  # the store may be gone, too
                self._ask(error.peer)
            words = self.activities.get(error.peer)
        return f"{error}; rank {error.peer} was last heard of {words}" if words else str(error)

    def _talk(self) -> None:
        before, still, beats, last, passed = b"", 0.0, 0, False, self._clock()
        while not last:
            last = self.ended.wait(self.seconds)
            beats += 1
            try:
                self._show(beats)
                if self.host is not None:
                    self._ask(self.host)
                latest = self._ask(self.neighbour)
                own = next(passed)
                still = still + own if latest == before and self.activities[self.neighbour] else 0.0
                if still > self.most:
                    self.store.set(_LOST, self._line(self.neighbour))
                elif hangs := self.look(own):
                    self.store.set(_LOST, f"rank {self.rank} {hangs}")
                if self.store.check([_LOST]) and not last:
                    self._announce(self.store.get(_LOST).decode())
            except RuntimeError:  # the store is gone; who needs it will say so
                return
            before, self.silence = latest, 0.0

    def _show(self, beats: int) -> None:
        self.store.set(_key(self.rank), json.dumps([beats, self.words]))

    def _clock(self) -> Iterator[float]:
        """Yields the seconds since the last call, as far as this rank was running."""
        since = time.monotonic()
        while True:
            now = time.monotonic()
            yield min(now - since, 2 * self.seconds)
            since = now

    def _ask(self, rank: int) -> bytes:
        latest = self.store.get(_key(rank)) if self.store.check([_key(rank)]) else b'[0, ""]'
        self.activities[rank] = json.loads(latest)[1]
        return latest

    def _listen(self) -> None:
        """Watches the store: if it is silent, the rank that serves it stands still."""
        assert self.host is not None
        passed = self._clock()
        while self.talking.is_alive() and not self.ended.wait(self.seconds):
            self.silence += next(passed)
            if self.silence > self.most:
                self._announce(self._line(self.host))

    def _announce(self, line: str) -> None:
        self.announced = True
        self.lost(line)

    def _line(self, rank: int) -> str:
        words = self.activities.get(rank, "")
        return f"rank {rank} has not responded for {self.timeout:g} s {words}".strip()


def _beat(timeout: float) -> float:
    """Returns the seconds from one look to the next."""
    return min(_LONGEST_BEAT, timeout / _BEATS)


def _key(rank: int) -> str:
    return f"watchdog/{rank}"
