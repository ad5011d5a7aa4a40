"""The operations of each rank on its communicators, in the order in which it begins them.

NCCL does the operations of a communicator one after the other, each when all ranks that take part
have come to it. So two ranks have to begin those of a communicator that they share in one order,
and sums and norms in one order over all communicators that they share: a rank that waits for one
may have no other before it that its peer begins later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from pipedream.graph.plan import RankAssignment
from pipedream.schedule.action import ENDS_BACKWARD, RECEIVES, SENDS, Action, Kind, StageLink
from pipedream.schedule.channel import Channel, TeamLink
from pipedream.schedule.overlap import LOOK_AHEAD

Use: TypeAlias = Literal["messages", "sums", "sums of tied parameters", "norms"]


class Operation(NamedTuple):
    """One on the communicator of `use` that has these `ranks`, all of which begin it. `link`: of
    messages. `what`: which of them it is, the same on each rank.
    """

    use: Use
    ranks: tuple[int, ...]
    link: TeamLink | None
    what: tuple[Kind, StageLink, int]

    @property
    def communicator(self) -> tuple[Use, tuple[int, ...], TeamLink | None]:
        return self[:3]


@dataclass
class SumTurns:
    """When a rank begins the sums of its stages: in the order of the list, each when its gradients
    are there and those of the stages before have begun.

    `closing[stage]`: the minibatches whose backward pass is the last of a round.
    """

    stages: Sequence[int]
    closing: Mapping[int, frozenset[int]]
    at: int = 0
    ended: int = 0
    full: set[int] = field(default_factory=set)

    @staticmethod
    def of(actions: Sequence[Action]) -> SumTurns:
        stages = sum_order(actions)
        by_stage = {stage: [a for a in actions if a.stage == stage] for stage in stages}
        return SumTurns(stages, {stage: closing(own) for stage, own in by_stage.items()})

    def begun(self, action: Action) -> Iterator[int]:
        """Yields the stages whose sums begin with this action."""
        stage = action.stage
        ends = action.kind in ENDS_BACKWARD and action.minibatch in self.closing.get(stage, ())
        if ends or action.kind is Kind.ALL_REDUCE:
            self.full.add(stage)
        while self.at < len(self.stages) and self.stages[self.at] in self.full:
            yield self.stages[self.at]
            self.at += 1
        if action.kind is Kind.ALL_REDUCE:
            self.ended += 1
            if self.ended == len(self.stages):
                self.at, self.ended, self.full = 0, 0, set()


def sum_order(actions: Iterable[Action]) -> list[int]:
    """Returns the stages in the order in which a rank waits for their sums, and begins them."""
    return list(dict.fromkeys(a.stage for a in actions if a.kind is Kind.ALL_REDUCE))


def closing(actions: Iterable[Action]) -> frozenset[int]:
    """Returns the minibatches whose backward pass is the last before an all-reduce, of a stage."""
    minibatches, last = set(), None
    for action in actions:
        if action.kind in ENDS_BACKWARD:
            last = action.minibatch
        elif action.kind is Kind.ALL_REDUCE and last is not None:
            minibatches.add(last)
            last = None
    return frozenset(minibatches)


@dataclass
class RankOperations:
    """What a rank begins that does these `actions`. `tied`: the stages that share parameters."""

    assignment: RankAssignment
    actions: Sequence[Action]
    tied: frozenset[int] = frozenset()
    look_ahead: int = LOOK_AHEAD
    counts: Counter[tuple[Use, int]] = field(default_factory=Counter)
    handed: Counter[Kind] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[tuple[Action, list[Operation]]]:
        """Yields each action with the operations that begin with it, receives that are posted ahead
        first.
        """
        turns, posted = SumTurns.of(self.actions), 0
        for position, action in enumerate(self.actions):
            committed = max(posted, min(position + self.look_ahead, len(self.actions)))
            begun = [self._message(a) for a in self.actions[posted:committed] if a.kind in RECEIVES]
            posted = committed
            if action.kind in SENDS:
                begun.append(self._message(action))
            begun += [self._sum("sums", [stage], stage) for stage in turns.begun(action)]
            begun += self._together(action)
            yield action, [each for each in begun if len(each.ranks) > 1]

    def _message(self, action: Action) -> Operation:
        assert action.peer is not None
        channel = Channel.of(action, self.assignment)
        sources, targets, is_gradient = channel.team_link
        kind = Kind.SEND_GRADIENT if is_gradient else Kind.SEND_ACTIVATION
        ranks = () if channel.is_local else tuple(sorted({*sources, *targets}))
        return Operation(
            "messages", ranks, channel.team_link, (kind, channel.link, action.minibatch)
        )

    def _together(self, action: Action) -> Iterator[Operation]:
        """Yields what the last of the rank's stages begins for all of them."""
        if action.kind is Kind.ALL_REDUCE and action.stage in self.tied:
            if self._is_last(action, len(self._stages & self.tied)):
                yield self._sum("sums of tied parameters", self.tied)
        elif action.kind is Kind.NORM and self._is_last(action, len(self._stages)):
            yield self._sum("norms", range(len(self.assignment)))

    @cached_property
    def _stages(self) -> frozenset[int]:
        return frozenset(action.stage for action in self.actions)

    def _is_last(self, action: Action, of: int) -> bool:
        self.handed[action.kind] += 1
        return self.handed[action.kind] % of == 0

    def _sum(self, use: Use, stages: Iterable[int], stage: int = -1) -> Operation:
        self.counts[use, stage] += 1
        ranks = {rank for each in stages for team in self.assignment[each] for rank in team.ranks}
        number = self.counts[use, stage]
        return Operation(use, tuple(sorted(ranks)), None, (Kind.ALL_REDUCE, (stage, stage), number))


def disorder(
    actions: Mapping[int, Sequence[Action]], assignment: RankAssignment, tied: Iterable[int] = ()
) -> str | None:
    """Returns which ranks would begin operations in different orders; None if none do. `actions`:
    by rank.
    """
    queues = dict[Hashable, dict[int, list[Operation]]]()
    for rank, own in actions.items():
        for _, begun in RankOperations(assignment, own, frozenset(tied)):
            for each in begun:
                for queue in _queues(each, rank):
                    queues.setdefault(queue, {}).setdefault(rank, []).append(each)
    for by_rank in queues.values():
        first, *others = by_rank.values()
        if any(other != first for other in others):
            ranks = ", ".join(map(str, sorted(by_rank)))
            return f"ranks {ranks} begin operations on their communicators in different orders"
    return None


def _queues(operation: Operation, rank: int) -> Iterator[Hashable]:
    """Yields what an operation of a rank has an order in: its communicator, and all that two ranks
    add up.
    """
    yield operation.communicator
    if operation.use != "messages":
        for other in operation.ranks:
            yield frozenset({rank, other})
