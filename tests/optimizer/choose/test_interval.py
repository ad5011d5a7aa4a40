"""The interval of what is expected in a run."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from pipedream.graph.cluster import Cluster
from pipedream.graph.profile import TrainingOverheads, Uncertainty
from pipedream.optimizer.choose.chooser import choose
from pipedream.optimizer.choose.interval import FLOOR, interval
from pipedream.optimizer.cost.models import NetworkCost
from pipedream.optimizer.search.request import Request


def deviation(waiting: float = 0.0, **known: object) -> float:
    """Of an interval, in parts of the time."""
    least, most = interval(2.0, waiting, Uncertainty(**known))  # type: ignore[arg-type]
    assert least * most == pytest.approx(4.0)
    return math.log(most / least) / 2 / 1.645


def test_each_part_widens_it() -> None:
    assert deviation() == pytest.approx(FLOOR)
    assert deviation(drift=0.03) == pytest.approx(math.hypot(FLOOR, 0.03))
    assert deviation(of_median=0.03) == pytest.approx(math.hypot(FLOOR, 0.03))
    assert deviation(estimated=0.03) == pytest.approx(math.hypot(FLOOR, 0.03))
    assert deviation(waiting=0.2) == pytest.approx(math.hypot(FLOOR, 0.1 / 3**0.5))
    assert deviation(waiting=-1e-9) == pytest.approx(FLOOR)


def test_nine_of_ten_draws_are_inside() -> None:
    draw = random.Random(0)
    least, most = interval(1.0, 0.0, Uncertainty(drift=0.03))
    runs = [math.exp(draw.gauss(0, math.hypot(FLOOR, 0.03))) for _ in range(20_000)]
    assert sum(least <= run <= most for run in runs) / len(runs) == pytest.approx(0.9, abs=0.01)


def test_further_profiles_narrow_it_or_widen_it() -> None:
    assert deviation(others=(0.0,)) < deviation(others=()) < deviation(others=(0.2,))
    assert deviation(others=(0.0, 0.0)) < deviation(others=(0.0,))
    assert deviation(others=(0.2,)) == pytest.approx(deviation(others=(-0.2,)))
    assert deviation(others=(0.2, 0.0)) < deviation(others=(0.2,))


def test_drift_makes_nobody_wait(make_graph) -> None:
    """It did, when the passes of all workers were drawn from it."""
    graph = make_graph("a b", "a-b", a=(100, 1e3, 1e3), b=(100, 1e3, 1e3))
    request = Request(graph, Cluster(machines=(2,), bandwidth=(1e12,)), NetworkCost())

    def said(spread: tuple[float, ...], drift: float) -> tuple[float, float]:
        known = TrainingOverheads({}, spread=spread, uncertainty=Uncertainty(drift=drift))
        predicted = choose(replace(request, overheads=known)).plan.predicted
        assert predicted.expected_interval is not None
        least, most = predicted.expected_interval
        return predicted.seconds_in_a_run, most / least

    still, drifting = said((1.0,), 0.0), said((1.0,), 0.1)
    assert drifting[0] == pytest.approx(still[0]) == pytest.approx(0.1, rel=0.01)
    assert drifting[1] > still[1]
    varying = said((0.8, 0.9, 1.0, 1.1, 1.2), 0.0)
    assert varying[0] > 1.03 * still[0]
    assert varying[1] > still[1]


def test_drift_that_each_worker_has_by_itself_makes_others_wait(make_graph) -> None:
    """E[max] of two is sigma / sqrt(pi) above the mean, of three 0.846 sigma. In a pipeline of
    equal stages the slowest sets the pace; replicas wait for it at each update.
    """
    graph = make_graph("a b c", "a-b b-c", **dict.fromkeys("abc", (100, 1e3, 1e3)))

    def said(own: float, devices: int) -> float:
        cluster = Cluster(machines=(devices,), bandwidth=(1e12,))
        request = Request(graph, cluster, NetworkCost())
        known = TrainingOverheads({}, spread=(1.0,), own_drift=own)
        return choose(replace(request, overheads=known)).plan.predicted.seconds_in_a_run

    assert said(0.1, 1) == pytest.approx(said(0.0, 1), rel=0.01)
    slower = said(0.1, 3) / said(0.0, 3)
    assert slower == pytest.approx(1.085, abs=0.01)


def test_what_workers_do_adds_up_to_the_expected_time(make_graph) -> None:
    graph = make_graph("a b", "a-b", a=(100, 1e3, 1e3), b=(50, 1e3, 1e3))
    request = Request(graph, Cluster(machines=(2,), bandwidth=(1e9,)), NetworkCost())
    plan = choose(replace(request, split=None)).plan
    assert plan.predicted.expected_stages is not None
    for stage in plan.predicted.expected_stages:
        whole = stage.compute + stage.waiting + stage.exchange
        assert whole == pytest.approx(plan.predicted.seconds_in_a_run, rel=0.01)
