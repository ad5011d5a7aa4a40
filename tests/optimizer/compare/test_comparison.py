from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from pipedream.graph.cluster import Cluster
from pipedream.graph.shown.tables import print_table
from pipedream.optimizer.choose.chooser import choose
from pipedream.optimizer.compare.comparison import (
    compare,
    comparison_frame,
    comparison_png,
    comparison_table,
)
from pipedream.optimizer.cost.models import NetworkCost, PaperCost
from pipedream.optimizer.search.request import Request


@pytest.fixture
def request_of(make_graph):
    graph = make_graph("a b c d", "a-b b-c c-d", a=(8, 1e3, 1e3), b=(2, 1e3, 1e3), d=(2, 1e3, 1e6))

    def make(memory=None):
        return Request(graph, Cluster(machines=(3,), bandwidth=(1e9,)), PaperCost(), memory=memory)

    return make


def test_the_name_of_a_schedule_is_not_broken(request_of):
    """On 80 columns a g of its own stood below `weight-stashin`."""
    text = StringIO()
    print_table(Console(file=text, width=80), comparison_table(compare(request_of(), 6, None), 6))
    assert text.getvalue().count("weight-stashing") == 4


@pytest.mark.slow
def test_six_plans_each_with_both_times(request_of):
    contenders = compare(request_of(), 6, None)
    frame = comparison_frame(contenders).set_index("plan")
    assert list(frame.index) == [
        "PipeDream",
        "Alpa, one submesh a stage",
        "straight pipeline",
        "GPipe, equal layers",
        "equal parameters",
        "data parallelism",
    ]
    assert frame["fits"].all()
    assert frame["replicas"]["data parallelism"] == "3"
    assert frame["schedule"]["GPipe, equal layers"] == "gpipe"
    times = frame["simulated_seconds_per_minibatch"]
    assert times["straight pipeline"] == pytest.approx(8e-3, rel=0.01)
    assert times["data parallelism"] == pytest.approx((13e-3 + 4 / 3 * 1e-3) / 3, rel=0.01)
    best = frame["seconds_per_minibatch"]["PipeDream"]
    assert (frame["seconds_per_minibatch"] >= best * (1 - 1e-9)).all()
    assert comparison_png(contenders).startswith(b"\x89PNG")


def test_the_plan_chosen_by_simulation_stands_first_and_is_the_fastest(request_of):
    """All are judged alike: in flight as many minibatches as busy links need, and simulated."""
    wanted = replace(request_of(), model=NetworkCost())
    frame = comparison_frame(compare(wanted, 6, choose(wanted).plan))
    assert list(frame["plan"][:2]) == ["this plan", "PipeDream"]
    stashing = frame[frame["schedule"] == "weight-stashing"]["simulated_seconds_per_minibatch"]
    assert stashing.iloc[0] == stashing.min()
    closed = frame["seconds_per_minibatch"] / frame["simulated_seconds_per_minibatch"]
    assert closed.between(0.85, 1.05).all()


def test_what_does_not_fit_is_shown_as_such(request_of):
    contenders = compare(request_of(memory=1.9e6), 6, None)
    frame = comparison_frame(contenders).set_index("plan")
    assert not frame["fits"].any()
    assert frame["memory_bytes"]["data parallelism"] > 1.9e6
    assert "no plan fits" in frame["problem"]["PipeDream"]
    text = StringIO()
    Console(file=text, width=120).print(comparison_table(contenders, 6))
    assert text.getvalue().count("does not fit") == 6
