"""How many updates come between a forward pass and the update its minibatch makes."""

from __future__ import annotations

import pytest
from schedules import schedule

from pipedream.graph.choices import ScheduleName


def rows(name: ScheduleName, replicas: tuple[int, ...], minibatches: int = 8) -> list[list[int]]:
    """The delays of the minibatches, for each stage."""
    links = [(stage, stage + 1) for stage in range(len(replicas) - 1)]
    made = schedule(name, replicas, links, minibatches, microbatches=4)
    delays = [made.delays(stage) for stage in range(len(replicas))]
    return [[row[minibatch] for minibatch in range(minibatches)] for row in delays]


def test_a_stage_is_as_late_as_there_are_stages_behind_it() -> None:
    """F0 F1 F2 B0 F3 B1 ...: minibatch 3 runs on version 1 and makes version 4 out of version 3."""
    assert rows("weight-stashing", (1, 1, 1)) == [
        [0, 1, 2, 2, 2, 2, 2, 2],
        [0, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_replicas_that_update_together_are_less_late() -> None:
    """Two replicas make one update of two minibatches: the third and fourth in flight are round 1.

    0    F0 F2 .  B0 F4 B2
    0.1  .  F1 F3 .  B1 F5 B3
    """
    assert rows("weight-stashing", (2, 1))[0] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert rows("weight-stashing", (1, 2))[1] == [0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ["flush", "gpipe"])
def test_nothing_is_late_where_the_pipeline_is_flushed(name: ScheduleName) -> None:
    assert rows(name, (1, 1, 1)) == [[0] * 8] * 3


def test_the_double_buffer_is_one_update_late_at_every_stage() -> None:
    assert rows("2bw", (1, 1, 1)) == [[0] * 4 + [1] * 4] * 3


def made_good(name: ScheduleName, replicas: tuple[int, ...], minibatches: int = 8) -> list[str]:
    """Of each stage: the update that each makes good, or a dash."""
    links = [(stage, stage + 1) for stage in range(len(replicas) - 1)]
    made = schedule(name, replicas, links, minibatches, microbatches=2)
    found = []
    for stage in range(len(replicas)):
        good = made.makes_good(stage)
        found.append(" ".join(str(good.get(each, "-")) for each in range(made.rounds(stage))))
    return found


def test_an_update_is_made_good_by_the_gradients_of_its_weights() -> None:
    """The gradients of version 0 come first, to update 0; all that come later are of it until the
    pipeline is full. Then those of version 1, with which update 1 would have been made.
    """
    assert made_good("weight-stashing", (1, 1, 1)) == [
        "- - - 1 2 3 4 5",
        "- - 1 2 3 4 5 6",
        "- - - - - - - -",
    ]
    assert made_good("vertical-sync", (1, 1, 1)) == ["- - - 1 2 3 4 5"] * 3
    assert made_good("2bw", (1, 1)) == ["- - 1 2"] * 2
    assert made_good("flush", (1, 1)) == ["- - - -"] * 2


@pytest.mark.parametrize("replicas", [(3, 2), (2, 1), (1, 3, 1), (4, 1, 2)])
def test_each_update_is_made_good_once_at_most(replicas: tuple[int, ...]) -> None:
    links = [(stage, stage + 1) for stage in range(len(replicas) - 1)]
    made = schedule("weight-stashing", replicas, links, 40)
    for stage in range(len(replicas)):
        good, delays = made.makes_good(stage), made.delays(stage)
        assert len(set(good.values())) == len(good)
        assert bool(good) == any(delays.values())
        assert all(earlier < later for later, earlier in good.items())
