"""Levels of machines: how many devices, and which rank is where."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipedream.graph.cluster import Cluster, Link, ring_seconds


def test_ranks_count_the_innermost_level_fastest() -> None:
    cluster = Cluster(machines=(4, 2), bandwidth=(1e10, 1e9))
    assert cluster.devices == 8
    assert cluster.rank((1, 1)) == 5
    assert [cluster.rank(place) for place in cluster.places()] == list(range(8))
    assert list(cluster.places())[:5] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]


def test_three_levels() -> None:
    cluster = Cluster(machines=(2, 3, 4), bandwidth=(3.0, 2.0, 1.0))
    assert cluster.devices == 24
    assert [cluster.rank(place) for place in cluster.places()] == list(range(24))
    assert cluster.rank((1, 2, 3)) == 23


@pytest.mark.parametrize(
    ("machines", "bandwidth", "says"),
    [
        ((), (), "at least one level"),
        ((4, 2), (1e9,), "2 levels of machines but 1 bandwidths"),
        ((4, 0), (1e9, 1e9), "at least 1 machine"),
        ((4,), (0.0,), "positive"),
        ((4,), (-1e9,), "positive"),
        ((4,), (math.inf,), "positive"),
        ((4,), (math.nan,), "positive"),
        ((2.5,), (1e9,), "valid integer"),
    ],
)
def test_an_impossible_cluster_is_refused(
    machines: tuple[float, ...], bandwidth: tuple[float, ...], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        Cluster.model_validate({"machines": machines, "bandwidth": bandwidth})


TWO = {"machines": (4, 2), "bandwidth": (1e9, 1e8)}
ONE_KIND = [{"name": "new"}]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"latency": (1e-5,)}, "2 levels of machines but 1 latencies"),
        ({"latency": (1e-5, -1.0)}, "greater than or equal to 0"),
        ({"names": ("device",)}, "2 levels of machines but 1 of names"),
        ({"send": (None,)}, "2 levels of machines but 1 of send"),
        ({"kinds": ONE_KIND}, "kind of each of the 2 machines"),
        ({"kinds": ONE_KIND, "machine_kinds": ("new", "old")}, "there is no kind old among new"),
        ({"machine_kinds": ("old", "old")}, "there is no kind old among none"),
    ],
)
def test_impossible_links_and_kinds_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Cluster.model_validate({**TWO, **fields})


def test_the_short_form_stays_short() -> None:
    cluster = Cluster(machines=(4, 2), bandwidth=(1e9, 1e8))
    assert cluster.model_dump() == TWO
    assert cluster.latency == (0.0, 0.0)
    assert cluster.kind(1).speed == 1.0
    assert cluster == Cluster(machines=(4, 2), bandwidth=(1e9, 1e8), latency=(0.0, 0.0))


def test_a_link_by_latency_and_bandwidth() -> None:
    link = Link(latency=0.5, bandwidth=10.0)
    assert link.seconds([0.0, 1.0, 20.0]).tolist() == [0.0, 0.6, 2.5]


def test_a_measured_link() -> None:
    link = Link(points=((10.0, 1.0), (20.0, 3.0), (40.0, 4.0)))
    # before the first, at it, between, between, after the last at 1/20 s for a byte
    assert link.seconds([1.0, 10.0, 15.0, 30.0, 60.0]).tolist() == [1.0, 1.0, 2.0, 3.5, 5.0]


def test_a_ring_takes_two_rounds_of_steps() -> None:
    step = Link(latency=0.5, bandwidth=10.0)
    assert ring_seconds(step, 60.0, [1, 2, 3]).tolist() == [0.0, 7.0, 10.0]  # 2 * 2 * (0.5 + 2)


def test_what_an_all_reduce_measured_is_what_it_is_taken_to_take() -> None:
    points = ((1e3, 1e-4), (1e6, 5e-3), (1e8, 0.2))
    for ring in (Link(points=points), Link(latency=1e-4, bandwidth=1e8)):
        cluster = Cluster(machines=(5,), bandwidth=(1e9,), all_reduce=(ring,))
        for size in (1e3, 1e4, 1e6, 1e9):
            taken = ring_seconds(cluster.ring_link(1), size, 5)
            assert taken == pytest.approx(ring.seconds(size))


@given(
    sizes=st.lists(st.floats(1, 1e9), min_size=2, max_size=5, unique=True).map(sorted),
    times=st.lists(st.floats(0, 10), min_size=5, max_size=5).map(sorted),
    messages=st.lists(st.floats(0, 1e10), min_size=2, max_size=2).map(sorted),
)
def test_more_bytes_never_take_less_time(
    sizes: list[float], times: list[float], messages: list[float]
) -> None:
    link = Link(points=tuple(zip(sizes, times, strict=False)))
    fewer, more = link.seconds(messages).tolist()
    assert fewer <= more * (1 + 1e-12)


def test_busy_is_written_where_it_is_known_and_goes_with_the_step_of_a_ring() -> None:
    plain, busy = Link(bandwidth=1e9), Link(bandwidth=1e9, busy=0.6)
    assert "busy" not in plain.model_dump()
    cluster = Cluster(machines=(2,), bandwidth=(1e9,), send=(plain,), all_reduce=(busy,))
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster
    assert (cluster.link(1).busy, cluster.ring_link(1).busy) == (0.0, 0.6)
    points = Link(points=((1.0, 1.0), (2.0, 2.0)), busy=0.6)
    assert points.stretched(0.5, 0.5).busy == 0.6
    assert Link(bandwidth=1e9, busy=1.3).busy == 1.3
    for share in (-0.1, 90.0):
        with pytest.raises(ValueError, match="busy"):
            Link(bandwidth=1e9, busy=share)
