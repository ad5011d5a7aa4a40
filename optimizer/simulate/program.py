"""The actions of all ranks as arrays, for the player: what waits for what, whatever it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np

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
    """A sum to which no backward pass of this rank contributes: the round had none for it."""


@dataclass(frozen=True)
class Program:
    """The actions of rank r are those from `begin[r]` to before `begin[r + 1]`.

    For each action: `op`; `kind`, a place in `KINDS`; `worker`, a place in `workers`; `minibatch`;
    and `subject`, the message that is sent or received, the sum that is waited for, or, of the last
    backward pass of a round, the sum to which it contributes (else -1).

    For each message: `link`, a place in `links`, `forwards` or back along it; `source` and `target`
    workers. For each sum: its `stage`.
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
        at = np.flatnonzero((self.op == Op.PASS) & (self.subject >= 0))
        own = self.stage[self.subject[at]]
        return {stage: at[own == stage] for stage in sorted(set(self.stage.tolist()))}

    @staticmethod
    def of(schedule: Schedule, actions: Sequence[Sequence[Action]]) -> Program:
        """The program of ranks with these actions under the schedule."""
        builder = _Builder(schedule)
        for listed in actions:
            builder.add_rank(listed)
        return builder.build(actions)


KINDS = tuple(Kind)

_OP = dict.fromkeys(SENDS, Op.SEND) | dict.fromkeys(RECEIVES, Op.RECEIVE)
_OP[Kind.ALL_REDUCE] = Op.SUM


class _Builder:
    def __init__(self, schedule: Schedule) -> None:
        self.workers = tuple(schedule.workers)
        self.number = {worker: number for number, worker in enumerate(self.workers)}
        self.links = {link: number for number, link in enumerate(schedule.spec.links)}
        self.reduces = [
            schedule.spec.reduces(stage) for stage in range(len(schedule.spec.replicas))
        ]
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.begin = [0]
        self.messages: dict[tuple[Worker, Worker, bool, int], int] = {}
        self.message_rows: list[tuple[int, bool, int, int]] = []
        self.sums: dict[tuple[int, int], int] = {}

    def add_rank(self, actions: Sequence[Action]) -> None:
        kinds = {kind: number for number, kind in enumerate(KINDS)}
        last_backward: dict[Worker, int] = {}
        for action in actions:
            kind, stage, replica, minibatch, _, peer, _ = action
            worker, subject, op = (stage, replica), -1, _OP.get(kind, Op.PASS)
            if peer is not None:
                subject = self._message(kind, worker, peer, minibatch)
            elif kind is Kind.ALL_REDUCE:
                subject = self.sums.setdefault((stage, minibatch), len(self.sums))
                contributes = last_backward.pop(worker, None)
                if contributes is None:
                    op = Op.LATE_SUM
                else:
                    self.rows[contributes] = (*self.rows[contributes][:4], subject)
            elif kind in ENDS_BACKWARD and self.reduces[stage]:
                last_backward[worker] = len(self.rows)
            self.rows.append((op, kinds[kind], self.number[worker], minibatch, subject))
        self.begin.append(len(self.rows))

    def _message(self, kind: Kind, worker: Worker, peer: Worker, minibatch: int) -> int:
        source, target = (worker, peer) if kind in SENDS else (peer, worker)
        forwards = kind in (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION)
        key = source, target, forwards, minibatch
        number = self.messages.get(key)
        if number is None:
            number = self.messages[key] = len(self.messages)
            link = (source[0], target[0]) if forwards else (target[0], source[0])
            self.message_rows.append(
                (self.links[link], forwards, self.number[source], self.number[target])
            )
        return number

    def build(self, actions: Sequence[Sequence[Action]]) -> Program:
        rows = np.array(self.rows, dtype=np.int64).reshape(-1, 5).T
        messages = np.array(self.message_rows, dtype=np.int64).reshape(-1, 4).T
        stages = np.array([stage for stage, _ in self.sums], dtype=np.int64)
        op, kind, worker, minibatch, subject = map(np.ascontiguousarray, rows)
        link, forwards, source, target = map(np.ascontiguousarray, messages)
        return Program(
            actions=tuple(map(tuple, actions)),
            workers=self.workers,
            begin=np.array(self.begin, dtype=np.int64),
            op=op,
            kind=kind,
            worker=worker,
            minibatch=minibatch,
            subject=subject,
            link=link,
            forwards=forwards,
            source=source,
            target=target,
            stage=stages,
        )


@lru_cache(maxsize=512)
def program_of(spec: PipelineSpec, minibatches: int, residents: Residents) -> Program:
    """The program of ranks with these workers, in the order of the spec."""
    schedule = Schedule(spec, minibatches)
    return Program.of(schedule, [schedule.actions(*workers) for workers in residents])
