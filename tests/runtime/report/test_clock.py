"""Clocks that differ are brought to one."""

from __future__ import annotations

import threading
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from pipedream.runtime.report import clock
from pipedream.runtime.report.clock import Clock, Ping, Reading

offsets = st.floats(-1e4, 1e4)
ways = st.floats(1e-6, 1e-2)


@given(offsets, st.lists(st.tuples(ways, ways, ways), min_size=1, max_size=8))
def test_a_reading_is_wrong_by_no_more_than_it_says(offset, trips):
    """Rank 0's clock is `offset` ahead; a question takes some time there, there and back."""
    pings, now = [], 5.0
    for there, answering, back in trips:
        heard = now + there
        answered = heard + answering
        pings.append(Ping(now, heard + offset, answered + offset, answered + back))
        now = answered + back
    found = Reading.of(pings)
    assert abs(found.offset - offset) <= found.error + 1e-9
    assert found.error <= min(there + back for there, _, back in trips) / 2 + 1e-9


def test_as_long_there_as_back_is_exact():
    """By hand: 3 s ahead, 0.25 s each way, 1 s to answer."""
    found = Reading.of([Ping(10.0, 13.25, 14.25, 11.5), Ping(20.0, 23.0, 23.0, 21.0)])
    assert found == (10.75, 3.0, 0.25)


def test_the_offset_drifts_evenly_between_two_readings():
    """A clock that goes 1 % too slow, 5 s behind when it is first read."""
    slow = Clock(HashStore(), 1, 2)
    slow.readings = [Reading(100.0, 5.0, 0.0)]
    assert slow.common(170.0) == 175.0
    slow.readings.append(Reading(200.0, 6.0, 0.0))
    assert [slow.common(own) for own in (100.0, 150.0, 200.0)] == [105.0, 155.5, 206.0]


def test_ranks_whose_clocks_differ_agree_on_the_time(monkeypatch):
    """Three ranks as threads: their clocks are 0, 1,000 and -2,000 s ahead of the real one."""
    ahead = {"rank0": 0.0, "rank1": 1000.0, "rank2": -2000.0}
    real = clock.time.perf_counter

    class Skewed:
        @staticmethod
        def perf_counter():
            return real() + ahead[threading.current_thread().name]

    monkeypatch.setattr(clock, "time", Skewed)
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    clocks = [Clock(store, rank, 3) for rank in range(3)]
    threads = [
        threading.Thread(target=lambda c=c: (c.read(), c.read()), name=f"rank{c.rank}")
        for c in clocks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(c.readings) for c in clocks] == [2, 2, 2]
    now = real()
    found = [c.common(now + ahead[f"rank{c.rank}"]) for c in clocks]
    for (a, b), c in zip(pairwise(found), clocks[1:], strict=True):
        assert a == pytest.approx(b, abs=0.05 + 10 * c.error)
    assert clocks[0].error == 0.0
