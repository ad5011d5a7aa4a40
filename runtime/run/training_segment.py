"""Positions in a run, and the segments between two checkpoints.

A segment is a run of consecutive minibatches of an epoch with a schedule of its own: the pipeline
is filled at its beginning and drained at its end. Then no minibatch is in flight on any rank, and
each stage has one version of its weights, which a checkpoint saves. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from math import lcm
from typing import Any

from pipedream.schedule.policy import Policy

_NAME = re.compile(r"epoch-(\d{4,})(?:-(\d{6,}))?")


@dataclass(frozen=True, order=True)
class Position:
    """A position in a run: the epochs that are complete, and minibatches of the next one."""

    epoch: int
    minibatch: int = 0

    def __str__(self) -> str:
        """`epoch-0003`, or `epoch-0003-000120` with 120 minibatches of the fourth epoch."""
        return f"epoch-{self.epoch:04}" + (f"-{self.minibatch:06}" if self.minibatch else "")

    @staticmethod
    def of(name: str) -> Position | None:
        """Returns the position that prints as `name`."""
        match = _NAME.fullmatch(name)
        return None if match is None else Position(int(match[1]), int(match[2] or 0))


@dataclass(frozen=True)
class TrainingSegment:
    """Minibatches `begin` to `end` - 1 of an epoch."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


def training_segments(
    minibatches: int, every: int | None, begin: int = 0
) -> Iterator[TrainingSegment]:
    """Yields the segments of an epoch from `begin` on: up to each multiple of `every`."""
    while begin < minibatches:
        end = minibatches if every is None else min((begin // every + 1) * every, minibatches)
        yield TrainingSegment(begin, end)
        begin = end


@dataclass(frozen=True)
class RankProgress:
    """How far a rank is when a graceful stop asks: in `segment`, which begins at `position`, with
    its first `touched` minibatches begun or done; or, with no segment, between two of them.
    """

    position: Position
    segment: TrainingSegment | None = None
    touched: int = 0

    @property
    def as_json(self) -> list[Any]:
        """The progress as JSON can hold it."""
        segment = self.segment and (self.segment.begin, self.segment.end)
        return [astuple(self.position), segment, self.touched]

    @staticmethod
    def of(fields: Sequence[Any]) -> RankProgress:
        """Returns the progress of which `fields` is `as_json`."""
        position, segment, touched = fields
        return RankProgress(Position(*position), segment and TrainingSegment(*segment), touched)


def stopping_position(progress: Sequence[RankProgress], policy: Policy) -> Position:
    """Returns the first position where all ranks can stop, after whole updates.

    A shorter segment differs from the longer one only in actions after the point where the first
    minibatch that it lacks could begin: when the minibatches one window before it are done. So the
    position lies a window after everything that has been touched.

    The end of an epoch, after all its minibatches, is another position than the beginning of the
    next: between them the held-out data are evaluated, by all ranks or by none.
    """
    first = max(each.position for each in progress)
    begun = [s for s in progress if s.position == first and s.segment is not None]
    if not begun:
        return first
    segment, touched = begun[0].segment, max(each.touched for each in begun)
    assert segment is not None
    end = min(segment.begin + whole_updates(touched + window(policy), policy), segment.end)
    return Position(first.epoch, end)


def window(policy: Policy) -> int:
    """Returns how many minibatches may be in the pipeline at the same time."""
    return max(count * policy.in_flight(stage) for stage, count in enumerate(policy.spec.replicas))


def whole_updates(every: int, policy: Policy) -> int:
    """Rounds `every` up so that every stage has made whole updates, on all replicas alike."""
    sizes = (policy.round_size(stage) for stage in range(len(policy.spec.replicas)))
    unit = lcm(*sizes, *policy.spec.replicas)
    return -(-every // unit) * unit
