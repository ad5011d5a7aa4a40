"""What a rank does in a segment, held and changed by another thread."""

from __future__ import annotations

import threading
import time

import pytest

from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.run.training_segment import TrainingSegment
from pipedream.schedule.action import Action, Kind


def stream(begin: int, end: int) -> ActionStream:
    """Each minibatch forward and at once backward."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return ActionStream(
        TrainingSegment(begin, end),
        [Action(kind, 0, 0, b, 0) for b in range(begin, end) for kind in kinds],
    )


def test_settling_goes_ahead_to_the_end() -> None:
    found = stream(10, 13)
    assert [found.commit(position, 4) for position in range(7)] == [4, 5, 6, 6, 6, 6, 6]


def test_what_is_held_settles_no_more() -> None:
    """The first five actions are those of minibatches 10, 11 and 12."""
    found = stream(10, 20)
    found.commit(1, 4)
    assert found.hold() == 3
    assert [found.commit(position, 4) for position in range(5)] == [5] * 5


def test_nothing_begun_touches_nothing() -> None:
    assert stream(10, 20).hold() == 0


def test_who_has_done_all_that_is_settled_waits_until_it_is_known_how_to_go_on() -> None:
    found = stream(10, 20)
    found.commit(0, 5)
    found.hold()
    answers: list[int] = []
    waiting = threading.Thread(target=lambda: answers.append(found.commit(5, 4)))
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    found.go_on(stream(10, 13))
    waiting.join(10)
    assert answers == [6]
    assert found.segment == TrainingSegment(10, 13)


def test_it_goes_on_as_it_was() -> None:
    found = stream(10, 20)
    found.commit(0, 5)
    found.hold()
    found.go_on()
    assert found.commit(5, 4) == 9
    assert found.segment == TrainingSegment(10, 20)


def test_what_is_settled_cannot_be_taken_back() -> None:
    found = stream(10, 20)
    found.commit(0, 5)
    found.hold()
    with pytest.raises(AssertionError):
        found.go_on(stream(10, 12))
