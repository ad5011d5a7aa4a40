"""The operations of each rank on its communicators, in the order in which it begins them.

NCCL does the operations of a communicator one after the other, each when all ranks that take part
have come to it. So two ranks have to begin those of a communicator that they share in one order,
and sums and norms in one order over all communicators that they share: a rank that waits for one
may have no other before it that its peer begins later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from pipedream.graph.plan import RankAssignment
from pipedream.schedule.action import ENDS_BACKWARD, RECEIVES, SENDS, Action, Kind, StageLink
from pipedream.schedule.channel import Channel, Communicator, Use, among
from pipedream.schedule.overlap import LOOK_AHEAD

T = TypeVar("T")


class Operation(NamedTuple):
    """One that all members of the communicator begin. `what`: which of its operations it is, the
    same on each rank.
    """

    communicator: Communicator
    what: tuple[Kind, StageLink, int]


@dataclass
class Turns(Generic[T]):
    """In which order a rank begins its sums in each round: those of `every` in turn, each when it
    can and those before it have begun.
    """

    every: Sequence[T]
    begun: int = 0
    ended: int = 0

    def advance(self, begin: Callable[[T], bool]) -> None:
        """Begins what can begin, up to the first that cannot; `begin` returns whether it could."""
        while self.begun < len(self.every) and begin(self.every[self.begun]):
            self.begun += 1

    def end_one(self) -> None:
        """Notes that one of them is there; with the last of them the round ends."""
        self.ended += 1
        if self.ended == len(self.every):
            self.begun = self.ended = 0


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
    """What a rank begins that does these `actions`. `tied`: the stages that share parameters.

    Replicas that divide updates (ZeRO-1) gather the parameters in an UPDATE, which counts for all:
    where ranks begin that in one order, too, the others do.
    """

    assignment: RankAssignment
    actions: Sequence[Action]
    tied: frozenset[int] = frozenset()
    look_ahead: int = LOOK_AHEAD

    def __iter__(self) -> Iterator[tuple[Action, list[Operation]]]:
        """Yields each action with the operations that begin with it, receives that are posted ahead
        first.
        """
        posted, self.counts, self.handed = 0, Counter[tuple[Use, int]](), Counter[Kind]()
        self.ways = dict[Hashable, tuple[Communicator, Kind, StageLink]]()
        self.turns, self.full = Turns(sum_order(self.actions)), set[int]()
        for position, action in enumerate(self.actions):
            committed = max(posted, min(position + self.look_ahead, len(self.actions)))
            messages = [each for each in self.actions[posted:committed] if each.kind in RECEIVES]
            posted = committed
            if action.kind in SENDS:
                messages.append(action)
            begun = [*map(self._message, messages), *self._sums(action), *self._together(action)]
            yield action, [each for each in begun if len(each.communicator.members) > 1]

    def _message(self, action: Action) -> Operation:
        way = action.kind, action.stage, action.replica, action.peer
        if way not in self.ways:
            channel = Channel.of(action, self.assignment)
            kind = Kind.SEND_GRADIENT if channel.is_gradient else Kind.SEND_ACTIVATION
            self.ways[way] = Communicator.of_link(channel.team_link), kind, channel.link
        communicator, kind, link = self.ways[way]
        return Operation(communicator, (kind, link, action.minibatch))

    def _sums(self, action: Action) -> list[Operation]:
        """Returns the sums over replicas that begin with an action."""
        ends = action.kind is Kind.ALL_REDUCE
        if ends or (action.kind in ENDS_BACKWARD and action.minibatch in self._last[action.stage]):
            self.full.add(action.stage)
        first = self.turns.begun
        self.turns.advance(self.full.__contains__)
        begun = self.turns.every[first : self.turns.begun]
        if ends:
            self.turns.end_one()
            if not self.turns.ended:
                self.full.clear()
        return [self._sum(Use.SUMS, [stage], stage) for stage in begun]

    def _together(self, action: Action) -> Iterator[Operation]:
        """Yields what the last of the rank's stages begins for all of them."""
        if action.kind is Kind.UPDATE:
            yield self._sum(Use.SUMS, [action.stage], action.stage)
        elif action.kind is Kind.ALL_REDUCE and action.stage in self.tied:
            if self._is_last(action, len(self._last.keys() & self.tied)):
                yield self._sum(Use.TIED_SUMS, self.tied)
        elif action.kind is Kind.NORM and self._is_last(action, len(self._last)):
            yield self._sum(Use.NORMS, range(len(self.assignment)))

    def _is_last(self, action: Action, of: int) -> bool:
        self.handed[action.kind] += 1
        return self.handed[action.kind] % of == 0

    def _sum(self, use: Use, stages: Iterable[int], stage: int = -1) -> Operation:
        self.counts[use, stage] += 1
        ranks = {rank for each in stages for team in self.assignment[each] for rank in team.ranks}
        what = Kind.ALL_REDUCE, (stage, stage), self.counts[use, stage]
        return Operation(among(ranks, use), what)

    @cached_property
    def _last(self) -> Mapping[int, frozenset[int]]:
        """By stage of the rank the minibatches whose backward pass is the last of a round."""
        stages = {action.stage for action in self.actions}
        return {
            stage: closing(action for action in self.actions if action.stage == stage)
            for stage in stages
        }


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
                for queue in _queues(each.communicator, rank):
                    queues.setdefault(queue, {}).setdefault(rank, []).append(each)
    for by_rank in queues.values():
        first, *others = by_rank.values()
        if any(other != first for other in others):
            ranks = ", ".join(map(str, sorted(by_rank)))
            return f"ranks {ranks} begin operations on their communicators in different orders"
    return None


def _queues(communicator: Communicator, rank: int) -> Iterator[Hashable]:
    """Yields what an operation of a rank has an order in: its communicator, and all that two ranks
    add up.
    """
    yield communicator
    if not communicator.receivers:
        for other in communicator.ranks:
            yield frozenset({rank, other})
