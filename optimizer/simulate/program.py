"""The actions of all ranks as arrays, for the player: what waits for what, whatever it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipedream.optimizer.cuts.planning_graph import Ints
from pipedream.schedule.action import (
    ENDS_BACKWARD,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Worker,
)
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec

Residents: TypeAlias = tuple[tuple[Worker, ...], ...]
"""The workers of each rank."""


class Op(IntEnum):
    """What a rank does in an action, as the player sees it."""

    PASS = 0
    SEND = 1
    RECEIVE = 2
    SUM = 3
    LATE_SUM = 4
    """A sum to which no backward pass of this rank contributes: the round had none for it, or it is
    a norm."""
    CONTRIBUTE = 5
    """The rank contributes to a sum and goes on."""


WHOLE = -1
"""In the place of a stage: the sum is over all of them."""


@dataclass(frozen=True)
class Program:
    """The actions of rank r are those from `begin[r]` to before `begin[r + 1]`.

    For each action: `op`; `kind`, a place in `KINDS`; `worker`, a place in `workers`; `minibatch`;
    and `subject`, the message that is sent or received, the sum that is waited for, or, of the last
    backward pass of a round, the sum to which it contributes (else -1). A norm is a sum, too.

    For each message: `link`, a place in `links`, `forwards` or back along it; `source` and `target`
    workers. For each sum: its `stage`, or WHOLE.
    """

    actions: tuple[tuple[Action, ...], ...]
    workers: tuple[Worker, ...]
    begin: Ints
    op: Ints
    kind: Ints
    worker: Ints
    minibatch: Ints
    subject: Ints
    link: Ints
    forwards: Ints
    source: Ints
    target: Ints
    stage: Ints

    @cached_property
    def closing(self) -> dict[int, Ints]:
        """By stage that has sums, the actions that are the last backward passes of a round."""
        stages = sorted(set(self.stage.tolist()) - {WHOLE})
        at = np.flatnonzero((self.op == Op.PASS) & (self.subject >= 0))
        own = self.stage[self.subject[at]]
        return {stage: at[own == stage] for stage in stages}

    @cached_property
    def ends_backward(self) -> NDArray[np.bool_]:
        """Whether each action ends the backward pass of a minibatch."""
        return _ENDS[self.kind]

    @cached_property
    def first_of_round(self) -> NDArray[np.bool_]:
        """Whether each action is the first of its worker, since its last update, that ends the
        backward pass of a minibatch.
        """
        at = np.argsort(self.worker, kind="stable")
        updates = np.cumsum(self.kind[at] == _NUMBER[Kind.UPDATE])
        ending = np.flatnonzero(self.ends_backward[at])
        other_worker = np.diff(self.worker[at][ending], prepend=-1) != 0
        later_round = np.diff(updates[ending], prepend=-1) != 0
        found = np.zeros(len(self.kind), bool)
        found[at[ending[other_worker | later_round]]] = True
        return found

    def updates_of(self, stage: int) -> Ints:
        """Returns the actions that are updates of this stage."""
        stages = np.array([own for own, _ in self.workers])[self.worker]
        return np.flatnonzero((self.kind == _NUMBER[Kind.UPDATE]) & (stages == stage))

    @staticmethod
    def of(schedule: Schedule, actions: Sequence[Sequence[Action]]) -> Program:
        """The program of ranks with these actions under the schedule."""
        workers = tuple(schedule.workers)
        table = _Table.of(list(chain.from_iterable(actions)), workers)
        op, subject = _OP[table.kind], np.full(len(table.kind), -1)
        forwards, source, target = _number_messages(table, subject)
        begin = np.array(list(accumulate(map(len, actions), initial=0)), dtype=np.int64)
        sums = _number_sums(table, op, subject)
        norms = _number_norms(table, op, subject, begin, len(sums))
        ends = np.where(forwards, (source, target), (target, source))
        stages = np.array([stage for stage, _ in workers])
        numbers = {link: number for number, link in enumerate(schedule.spec.links)}
        links = [numbers[link] for link in zip(*stages[ends].tolist(), strict=True)]
        return Program(
            actions=tuple(map(tuple, actions)),
            workers=workers,
            begin=begin,
            op=op,
            kind=table.kind,
            worker=table.worker,
            minibatch=table.minibatch,
            subject=subject,
            link=np.array(links, dtype=np.int64),
            forwards=forwards.astype(np.int64),
            source=source,
            target=target,
            stage=np.append(table.stage[sums], [WHOLE] * norms).astype(np.int64),
        )


KINDS = tuple(Kind)

_NUMBER = {kind: number for number, kind in enumerate(KINDS)}


def _among(kinds: Iterable[Kind]) -> NDArray[np.bool_]:
    """Returns of each kind, by its number, whether it is among these."""
    chosen = set(kinds)
    return np.array([kind in chosen for kind in KINDS])


_SENDS, _MESSAGES = _among(SENDS), _among(SENDS | RECEIVES)
_ACTIVATIONS = _among({Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION})
_ENDS, _SUMS = _among(ENDS_BACKWARD), _among({Kind.ALL_REDUCE})

_OP = np.full(len(KINDS), Op.PASS, dtype=np.int64)
_OP[_MESSAGES] = Op.RECEIVE
_OP[_SENDS] = Op.SEND
_OP[_SUMS] = Op.SUM


class _Table(NamedTuple):
    """The columns of some actions; `worker` and `peer` (-1 for none) are places of workers."""

    kind: Ints
    stage: Ints
    worker: Ints
    minibatch: Ints
    peer: Ints

    @staticmethod
    def of(actions: Sequence[Action], workers: Sequence[Worker]) -> _Table:
        place: dict[Worker | None, int] = {worker: at for at, worker in enumerate(workers)}
        place[None] = -1
        columns = (
            [_NUMBER[action[0]] for action in actions],
            [action[1] for action in actions],
            [place[action[1:3]] for action in actions],
            [action[3] for action in actions],
            [place[action[5]] for action in actions],
        )
        return _Table(*(np.array(column, dtype=np.int64) for column in columns))


def _number_messages(table: _Table, subject: Ints) -> tuple[NDArray[np.bool_], Ints, Ints]:
    """Enters the number of its message as the subject of each send and receive. Returns of each
    message whether it goes forwards, and its source and target.
    """
    at = np.flatnonzero(_MESSAGES[table.kind])
    sends, forwards = _SENDS[table.kind[at]], _ACTIVATIONS[table.kind[at]]
    worker, peer, minibatch = table.worker[at], table.peer[at], table.minibatch[at]
    source, target = np.where(sends, (worker, peer), (peer, worker))
    workers = int(table.worker.max(initial=0)) + 1
    keys = ((minibatch * workers + source) * workers + target) * 2 + forwards
    _, first, subject[at] = np.unique(keys, return_index=True, return_inverse=True)
    return forwards[first], source[first], target[first]


def _number_sums(table: _Table, op: Ints, subject: Ints) -> Ints:
    """Enters the number of each sum at its actions; returns an all-reduce of each."""
    ends, sums = _ENDS[table.kind], _SUMS[table.kind]
    at = np.flatnonzero(sums)
    keys = table.stage[at] * (table.minibatch.max(initial=0) + 1) + table.minibatch[at]
    _, first, subject[at] = np.unique(keys, return_index=True, return_inverse=True)
    closing = np.flatnonzero(ends | sums)
    closing = closing[np.argsort(table.worker[closing], kind="stable")]
    before, after = closing[:-1], closing[1:]
    same = sums[after] & ends[before] & (table.worker[before] == table.worker[after])
    subject[before[same]] = subject[after[same]]
    late = np.setdiff1d(at, after[same])
    op[late] = Op.LATE_SUM
    return at[first]


def _number_norms(table: _Table, op: Ints, subject: Ints, begin: Ints, first: int) -> int:
    """Enters the number of its sum, from `first` on, as the subject of each norm. A rank waits at
    the last of its workers' norms of a round. Returns how many sums these are.
    """
    at = np.flatnonzero(table.kind == _NUMBER[Kind.NORM])
    rounds, number = np.unique(table.minibatch[at], return_inverse=True)
    subject[at], op[at] = first + number, Op.CONTRIBUTE
    rank = np.searchsorted(begin, at, side="right")
    _, last = np.unique((rank * len(rounds) + number)[::-1], return_index=True)
    op[at[::-1][last]] = Op.LATE_SUM
    return len(rounds)


@lru_cache(maxsize=512)
def program_of(spec: PipelineSpec, minibatches: int, residents: Residents) -> Program:
    """The program of ranks with these workers, in the order of the spec."""
    schedule = Schedule(spec, minibatches)
    return Program.of(schedule, [schedule.actions(*workers) for workers in residents])
