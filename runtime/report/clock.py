"""One clock for all ranks: that of rank 0, with which each compares its own through the store."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from torch._C._distributed_c10d import Store

PINGS = 8


class Ping(NamedTuple):
    """A question to rank 0 and its answer: when it was `sent` and the answer `received` by one's
    own clock, when it was `heard` and `answered` by that of rank 0, in seconds.
    """

    sent: float
    heard: float
    answered: float
    received: float

    @property
    def round_trip(self) -> float:
        """Returns the seconds on the way, there and back."""
        return (self.received - self.sent) - (self.answered - self.heard)


class Reading(NamedTuple):
    """When this rank's clock was at `own`, rank 0's was at own + `offset`, give or take `error`."""

    own: float
    offset: float
    error: float

    @staticmethod
    def of(pings: Iterable[Ping]) -> Reading:
        """From the ping that was on its way for the shortest time, taken to be as long there as
        back (NTP's clock offset, RFC 5905, section 8): wrong by half the round trip at most.
        """
        best = min(pings, key=lambda ping: ping.round_trip)
        offset = ((best.heard - best.sent) + (best.answered - best.received)) / 2
        return Reading((best.sent + best.received) / 2, offset, best.round_trip / 2)


class Clock:
    """This rank's clock beside rank 0's: `read` is called by all ranks at the same points of a run.

    Between the first reading and the last the offset is taken to drift evenly.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.readings: list[Reading] = []

    def read(self) -> None:
        """Rank 0 answers one rank after the other. Raises DistStoreError where one is gone."""
        number = len(self.readings)
        if self.rank == 0:
            for rank in range(1, self.world_size):
                for ping in range(PINGS):
                    self._answer(f"clock/{number}/{rank}/{ping}")
            now = time.perf_counter()
            self.readings.append(Reading(now, 0.0, 0.0))
        else:
            keys = (f"clock/{number}/{self.rank}/{ping}" for ping in range(PINGS))
            self.readings.append(Reading.of(self._ask(key) for key in keys))

    def _ask(self, key: str) -> Ping:
        sent = time.perf_counter()
        self.store.set(f"{key}/asked", "")
        self.store.wait([f"{key}/answered"])
        received = time.perf_counter()
        heard, answered = map(float, self.store.get(f"{key}/answered").split())
        self.store.delete_key(f"{key}/answered")
        return Ping(sent, heard, answered, received)

    def _answer(self, key: str) -> None:
        self.store.wait([f"{key}/asked"])
        heard = time.perf_counter()
        self.store.delete_key(f"{key}/asked")
        answered = time.perf_counter()
        self.store.set(f"{key}/answered", f"{heard!r} {answered!r}")

    def common(self, own: float) -> float:
        """Returns `own`, a moment of `time.perf_counter` here, by rank 0's clock."""
        first, last = self.readings[0], self.readings[-1]
        if last.own == first.own:
            return own + first.offset
        drift = (last.offset - first.offset) / (last.own - first.own)
        return own + first.offset + drift * (own - first.own)

    @property
    def error(self) -> float:
        """Returns by how many seconds `common` may be wrong at a reading."""
        return max(reading.error for reading in self.readings)
