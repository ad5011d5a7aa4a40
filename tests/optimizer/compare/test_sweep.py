import math
from itertools import pairwise

import pytest

from pipedream.graph.cluster import Cluster, Link
from pipedream.graph.errors import UserError
from pipedream.optimizer.compare.sweep import (
    MOST_POINTS,
    parse_range,
    shaped,
    sweep,
    sweep_frame,
    sweep_png,
    thinned,
)
from pipedream.optimizer.cost.models import PaperCost
from pipedream.optimizer.search.request import Request

THREE = Cluster(machines=(4, 2, 2), bandwidth=(9e9, 3e9, 1e9), latency=(1e-6, 2e-6, 3e-6))


@pytest.mark.parametrize(
    ("workers", "machines"),
    [
        (1, (1,)),
        (3, (3,)),
        (4, (4,)),
        (5, None),
        (6, None),
        (8, (4, 2)),
        (12, None),
        (16, (4, 2, 2)),
        (24, (4, 2, 3)),
        (64, (4, 2, 8)),
    ],
)
def test_levels_fill_from_the_innermost_and_the_outermost_grows(workers, machines):
    cluster = shaped(THREE, workers)
    assert (cluster and cluster.machines) == machines
    if cluster is not None:
        assert cluster.bandwidth == THREE.bandwidth[: len(machines)]
        assert cluster.latency == THREE.latency[: len(machines)]


def test_of_many_clusters_some_are_planned_that_grow_by_a_factor():
    flat = Cluster(machines=(2,), bandwidth=(1e9,))
    clusters = [shaped(flat, workers) for workers in range(1, 1025)]
    sizes = [cluster.devices for cluster in thinned(clusters)]
    assert (sizes[:4], sizes[-1]) == ([1, 2, 3, 4], 1024)
    assert len(sizes) <= MOST_POINTS
    assert all(1 < b / a <= 2 for a, b in pairwise(sizes))
    assert max(b / a for a, b in pairwise(sizes[10:])) < 1.2
    assert thinned(clusters[:64]) == clusters[:64]


@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_a_measured_collective_counts_for_as_many_as_it_was_measured_on(name):
    link = Link(bandwidth=1e9)
    cluster = Cluster(machines=(2, 2), bandwidth=(1e9, 1e9), **{name: (link, link)})
    assert getattr(shaped(cluster, 4), name) == (link, link)
    assert getattr(shaped(cluster, 6), name) == (link, None)


@pytest.mark.parametrize("text", ["8", "0..4", "4..2", "1..99999", "a..b", "1..2..3"])
def test_a_range_that_is_none(text):
    with pytest.raises(UserError, match="give the fewest and the most workers"):
        parse_range(text)


def test_a_row_for_each_number_and_the_picture(make_graph):
    graph = make_graph("a b c", "a-b b-c", a=(6, 1e3, 1e3), b=(6, 1e3, 1e3), c=(6, 1e3, 1e8))
    request = Request(graph, Cluster(machines=(2, 2), bandwidth=(1e9, 1e9)), PaperCost())
    frame = sweep_frame(list(sweep(request, parse_range("1..5"))))
    assert list(frame.workers) == [1, 2, 4]
    assert list(frame.machines) == ["1", "2", "2,2"]
    assert list(frame.ideal * 18e-3) == pytest.approx([1, 2, 4])
    assert (frame.plan >= frame.data_parallel * (1 - 1e-9)).all()
    assert (frame.plan <= frame.ideal * (1 + 1e-9)).all()
    assert frame.plan[0] == pytest.approx(1 / 18e-3)
    assert sweep_png(frame).startswith(b"\x89PNG")


def test_numbers_of_workers_that_nothing_fits_on_have_no_plan(make_graph):
    graph = make_graph("a b c", "a-b b-c", a=(6, 1, 1e3), b=(6, 1, 1e3), c=(6, 1, 1e3))
    request = Request(graph, Cluster(machines=(3,), bandwidth=(1e9,)), PaperCost(), memory=5.5e3)
    frame = sweep_frame(list(sweep(request, range(1, 4))))
    assert math.isnan(frame.plan[0])
    assert frame.plan[2] > 0
