"""Levels of machines: how many devices, and which rank is where."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from pipedream.graph.cluster import Cluster


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
