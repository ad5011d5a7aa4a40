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
