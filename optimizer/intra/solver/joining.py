"""A smaller problem in which some variables follow others: one label for all of them.

Each variable follows a joint one, whose label says its own. What the joint problem takes is exactly
what the whole one takes with the labels that follow, so its best choice is a choice of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipedream.optimizer.intra.solver.problem import Floats, Ints, Problem, Value


@dataclass(frozen=True)
class Merged:
    """What a value of the whole problem is in the joint one: reader k has become `readers[k]` of
    the one with this number.
    """

    value: int
    readers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Joined:
    """`of[variable]`: the joint variable, the first ones of `problem`; `labels[variable][label of
    the joint one]`: the label that follows. `values`: None for one whose cost is a joint variable's
    own.
    """

    problem: Problem
    of: Ints
    labels: Sequence[Ints]
    values: Sequence[Merged | None]

    def expanded(self, labels: Ints) -> Ints:
        """The labels of the whole problem for those of the joint one."""
        pairs = zip(self.of, self.labels, strict=True)
        return np.array([own[labels[joint]] for joint, own in pairs], dtype=np.intp)


def join(problem: Problem, of: Ints, labels: Sequence[Ints]) -> Joined:
    """`of`, `labels`: as in `Joined`; joint variables are numbered from 0 without gaps."""
    return _Joiner(problem, of, labels).run()


@dataclass
class _Joiner:
    whole: Problem
    of: Ints
    labels: Sequence[Ints]
    seconds: list[Floats] = field(default_factory=list)
    bytes: list[Floats] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    known: dict[object, int] = field(default_factory=dict)
    copies: dict[int, list[int]] = field(default_factory=dict)
    """Variables that have the label of a joint one, for values that it has several ends of."""

    def run(self) -> Joined:
        count = int(self.of.max(initial=-1)) + 1
        self.seconds, self.bytes = [np.zeros(1)] * count, [np.zeros(1)] * count
        for v, joint in enumerate(self.of):
            self.seconds[joint] = self.seconds[joint] + self.whole.seconds[v][self.labels[v]]
            self.bytes[joint] = self.bytes[joint] + self.whole.bytes[v][self.labels[v]]
        values = [self._value(value) for value in self.whole.values]
        problem = Problem(self.seconds, self.bytes, self.values, self.whole.limit)
        return Joined(problem, self.of, self.labels, values)

    def _value(self, value: Value) -> Merged | None:
        source, given = int(self.of[value.source]), value.given[self.labels[value.source]]
        ends: dict[tuple[int, bool, bytes], int] = {}
        wanted, joints, places = list[Ints](), list[int](), list[int]()
        for reader, own, when in zip(value.readers, value.wanted, value.backward, strict=True):
            joint, followed = int(self.of[reader]), own[self.labels[reader]]
            end = joint, when, followed.tobytes()
            if end not in ends:  # else another reader always wants it so, too
                ends[end] = len(joints)
                joints.append(joint)
                wanted.append(followed)
            places.append(ends[end])
        backward = tuple(when for _, when, _ in ends)
        if all(joint == source for joint in joints):
            seconds, held = replace(value, backward=backward).cost(given, wanted)
            self.seconds[source] = self.seconds[source] + seconds
            self.bytes[source] = self.bytes[source] + held
            return None
        placements = value.seconds.shape  # of which no label may have the last ones
        key = source, given.tobytes(), value.same.tobytes(), value.keeps, placements, *ends
        if key not in self.known:
            readers = self._distinct(source, joints)
            made = replace(
                value,
                source=source,
                given=given,
                readers=readers,
                wanted=tuple(wanted),
                backward=backward,
            )
            self.known[key] = len(self.values)
            self.values.append(made)
        else:
            self.values[self.known[key]] = _sum(self.values[self.known[key]], value)
        return Merged(self.known[key], tuple(places))

    def _distinct(self, source: int, joints: Sequence[int]) -> tuple[int, ...]:
        """A variable of its own for each end: copies where a joint one has several."""
        used, readers = {source: 0}, list[int]()
        for joint in joints:
            number = used.get(joint, -1)
            used[joint] = number + 1
            readers.append(joint if number < 0 else self._copy(joint, number))
        return tuple(readers)

    def _copy(self, joint: int, number: int) -> int:
        own = self.copies.setdefault(joint, [])
        while len(own) <= number:
            labels = np.arange(len(self.seconds[joint]))
            own.append(len(self.seconds))
            self.seconds.append(np.zeros(len(labels)))
            self.bytes.append(np.zeros(len(labels)))
            apart = np.where(np.eye(len(labels), dtype=np.bool_), 0.0, np.inf)
            nothing = np.zeros(len(labels))
            same = np.full(len(labels), -1)
            ends = joint, labels, (own[-1],), (labels,)
            self.values.append(Value(*ends, apart, (False,), nothing, nothing, same))
        return own[number]


def _sum(joint: Value, other: Value) -> Value:
    """The joint value, of which the other is one more once its variables are joined."""
    return replace(
        joint,
        seconds=joint.seconds + other.seconds,
        given_bytes=joint.given_bytes + other.given_bytes,
        wanted_bytes=joint.wanted_bytes + other.wanted_bytes,
        count=joint.count + other.count,
    )
