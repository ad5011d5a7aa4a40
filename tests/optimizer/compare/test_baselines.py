"""The simple plans are what they say they are."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.compare.comparison import (
    balanced,
    data_parallel,
    equal_layers,
    equal_parameters,
)
from pipedream.optimizer.cost.models import PaperCost
from pipedream.optimizer.search.request import Request


@pytest.fixture
def request_on(make_graph):
    """A chain of six layers; most parameters are in the last two."""
    graph = make_graph(
        "a b c d e f",
        "a-b b-c c-d d-e e-f",
        a=(4, 100, 10),
        e=(1, 100, 5000),
        f=(1, 100, 4000),
    )

    def make(*machines):
        return Request(
            graph, Cluster(machines=machines, bandwidth=(1e9,) * len(machines)), PaperCost()
        )

    return make


def stages(outcome):
    return [" ".join(stage.nodes) for stage in outcome.plan.stages]


def test_equal_layers(request_on):
    outcome = equal_layers(request_on(3), 6)
    assert stages(outcome) == ["a b", "c d", "e f"]
    assert outcome.plan.schedule == "gpipe"
    assert outcome.plan.predicted.latency_seconds == pytest.approx(5e-3 + 2e-3 + 2e-3 + 5 * 5e-3)


def test_equal_parameters(request_on):
    outcome = equal_parameters(request_on(3))
    assert stages(outcome)[1:] == ["e", "f"]
    assert outcome.plan.predicted.seconds_per_minibatch == pytest.approx(7e-3)


def test_data_parallelism_is_one_stage_on_all_devices(request_on):
    outcome = data_parallel(request_on(2, 2))
    assert stages(outcome) == ["a b c d e f"]
    assert sorted(outcome.plan.stages[0].ranks) == [0, 1, 2, 3]
    predicted = outcome.plan.predicted
    assert predicted.seconds_per_minibatch == predicted.data_parallel_seconds


def test_stages_of_a_straight_pipeline_follow_the_devices(request_on):
    outcome = equal_layers(request_on(2, 2), 4)
    assert [stage.ranks for stage in outcome.plan.stages] == [(0,), (1,), (2,), (3,)]


def test_no_more_stages_than_layers(request_on):
    assert len(equal_layers(request_on(9), 4).plan.stages) == 6


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.data())
def test_the_heaviest_run_is_as_light_as_can_be(weights, data):
    pieces = data.draw(st.integers(1, len(weights)))
    ends = balanced(np.array(weights, dtype=float), pieces)
    assert ends == sorted(set(ends))
    assert (len(ends), ends[-1], min(ends) > 0) == (pieces, len(weights), True)

    def heaviest(ends):
        return max(sum(weights[a:b]) for a, b in zip([0, *ends], ends, strict=False))

    cuts = combinations(range(1, len(weights)), pieces - 1)
    assert heaviest(ends) == min(heaviest([*cut, len(weights)]) for cut in cuts)
