"""The hierarchical dynamic program: the best pipeline of pipelines over nested downsets.

PipeDream, SOSP 2019, section 3.1 (seeds/004, section 4.2), from the innermost level outwards: level
k divides a piece of the model into stages, each on some components of level k - 1 that all do the
same, so that the cost of a stage rests on the best pipeline *inside* one component. Level 0 is a
device. Differences from the source:

- all pairs of nested downsets are tried and no others, so that no stage is ever negative;
- it grows pipelines from their end, so that a stage knows the workers behind it when it is placed,
  and with them its minibatches in flight and its memory. A component's inner pipeline needs to know
  one number of what is behind: the workers of later stages per component, its `load`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf, prod
from typing import NamedTuple

import numpy as np

from pipedream.optimizer.cuts import Cuts, States
from pipedream.optimizer.planning import Floats
from pipedream.optimizer.stage_cost import StageCost

# Two costs this close are the same: what rounding can do to a sum of a thousand times.
TIE = 1e-11

# Elementary steps that numpy does in about half a minute: the search is exact up to here.
_BUDGET = 1e10


@dataclass(frozen=True)
class Rules:
    """`straight`: no replication. `fewer_machines`: components may be left without work."""

    straight: bool = False
    fewer_machines: bool = False


class Share(NamedTuple):
    """A stage at one level (1 innermost): from cut `start` to `end`, on `replicas` components of
    the level below, of which the first is number `offset`. `first`: it begins its pipeline.
    """

    level: int
    start: int
    end: int
    offset: int
    replicas: int
    first: bool


class NestedStage(NamedTuple):
    """A stage on devices: its share of each level, innermost first."""

    shares: tuple[Share, ...]

    @property
    def start(self) -> int:
        return self.shares[0].start

    @property
    def end(self) -> int:
        return self.shares[0].end

    @property
    def replicas(self) -> int:
        return prod(share.replicas for share in self.shares)


class Solution(NamedTuple):
    cost: float
    stages: tuple[NestedStage, ...]


class _Room(NamedTuple):
    """A component of `level` that is to be filled, and the workers behind it for each such one."""

    level: int
    load: Fraction


class _Left(NamedTuple):
    """The components and devices (0 where they are not counted) of a room for a pipeline."""

    components: int
    devices: int


class _Placing(NamedTuple):
    """A stage on `replicas` components and `used` devices of each (0 where not counted).

    `behind`: how many components may be left to the stages behind it. `loads[m][w]`: the load
    inside each component with `behind[m]` components and w devices behind it; a list is of length 1
    where it makes no difference.
    """

    replicas: int
    used: int
    behind: range
    loads: list[list[Fraction]]

    def leaves(self, left: _Left) -> _Left | None:
        """What is left to the stages behind; None if this stage does not fit."""
        components = left.components - self.replicas
        devices = left.devices - self.replicas * self.used
        return _Left(components, devices) if components in self.behind and devices >= 0 else None

    def at(self, behind: _Left) -> tuple[int, int]:
        """Where `loads` has the case of this much behind."""
        return min(self.behind.index(behind.components), len(self.loads) - 1), behind.devices


class _Option(NamedTuple):
    """A placing, and what it costs: `cost[m, w, end]`, with m and w as in its `loads`."""

    placing: _Placing
    cost: Floats


class Search:
    """Finds the pipeline whose costliest stage costs least; ties go to the fewest stages.

    Work: N^2 M^2 for N cuts and M machines at the outermost level, N^3 M^2 at each within.
    """

    def __init__(self, cuts: Cuts, machines: Sequence[int], cost: StageCost, rules: Rules) -> None:
        self.cuts = cuts
        self.machines = machines
        self.cost = cost
        self.rules = rules
        self.devices = tuple(prod(machines[:level]) for level in range(len(machines) + 1))
        # The load needs the number of devices behind a stage. It follows from the number of
        # components, unless a component may use only some of its devices.
        self.counting = cost.depends_on_load and rules.fewer_machines and len(machines) > 1
        self._tables: dict[_Room, Floats] = {}
        self._placed: dict[tuple[_Room, bool], list[_Placing]] = {}

    def best(self) -> Solution | None:
        """The best pipeline; None if there is none."""
        room, piece = _Room(len(self.machines), Fraction(0)), (0, len(self.cuts) - 1)
        costs = self._pipelines(room, piece)[1].min(axis=0)[:, 0, 0]
        used = int(costs.argmin())
        cost = float(costs[used])
        return None if cost == inf else Solution(cost, tuple(self._unfold(room, piece, used, cost)))

    def _inside(self, room: _Room, start: int, ends: States) -> Floats:
        """[used, end]: the best cost in this room of the pieces that begin at `start`."""
        if room.level == 0:
            cost = self.cost.on_device(start, ends, room.load)[None]
            return np.concatenate([np.full_like(cost, inf), cost]) if self.counting else cost
        if room not in self._tables:
            self._tables[room] = self._pipelines(room)[1].min(axis=0)
        return self._tables[room][:, start, ends]

    def _pipelines(
        self, room: _Room, piece: tuple[int, int] | None = None, within: float | None = None
    ) -> tuple[Floats, Floats]:
        """The best pipelines in this room, for every piece of the model or the one given.

        Returns `later[m, w, start, end]`, for those on m components and w devices (0 where they are
        not counted) that another stage comes before, and `whole`, likewise, for those that are the
        whole piece; `end` is the last axis, of length 1 for one piece. The figures are costs; or,
        where `within` is given, numbers of stages none of which costs more.
        """
        begin, end = piece or (0, len(self.cuts) - 1)
        ends = range(len(self.cuts)) if piece is None else range(end, end + 1)
        width = self.devices[room.level] + 1 if self.counting else 1
        count = self.machines[room.level - 1]
        later = np.full((count + 1, width, len(self.cuts), len(ends)), inf)
        whole = np.full_like(later, inf)
        later[0, 0, ends, range(len(ends))] = 0.0
        join = np.maximum if within is None else np.add
        for start in reversed(range(begin, end)):
            after = self.cuts.after(start, end)
            reached = slice(start + 1, None) if piece is None else slice(None)
            rest = later[:, :, after, reached]
            if not rest.size:  # a cut that is not within the piece
                continue
            for first, table in ((False, later), (True, whole)):
                if not first or piece is None or start == begin:
                    for option in self._options(room, start, after, first, within):
                        _extend(table[:, :, start, reached], rest, option, join)
        return later, whole

    def _options(
        self, room: _Room, start: int, after: States, first: bool, within: float | None
    ) -> Iterator[_Option]:
        """Every way to place the stages from `start`, all of them costed in one question.

        With `within` the cost is a number of stages: 1, infinite for a stage that costs more, and
        more than any pipeline has for one without work.
        """
        placings = self._placings(room, first)
        cases = [(placing, load) for placing in placings for row in placing.loads for load in row]
        below = {
            load: self._inside(_Room(room.level - 1, load), start, after)
            for load in {load for _, load in cases}
        }
        inner = np.array([below[load][placing.used] for placing, load in cases])
        replicas = np.array([[placing.replicas] for placing, _ in cases])
        cost = self.cost.replicated(inner, start, after, room.level, replicas, first)
        if within is not None:
            works = self.cuts.working[after] > self.cuts.working[start]
            cost = np.where(cost <= within, np.where(works, 1.0, len(self.cuts)), inf)
        position = 0
        for placing in placings:
            shape = len(placing.loads), len(placing.loads[0])
            rows = cost[position : position + prod(shape)]
            yield _Option(placing, rows.reshape(*shape, -1))
            position += len(rows)

    def _placings(self, room: _Room, first: bool) -> list[_Placing]:
        """Every number of components, and devices in each, that a stage may have."""
        if (room, first) not in self._placed:
            self._placed[room, first] = list(self._new_placings(room, first))
        return self._placed[room, first]

    def _new_placings(self, room: _Room, first: bool) -> Iterator[_Placing]:
        count = self.machines[room.level - 1]
        counts = range(1, self.devices[room.level - 1] + 1) if self.counting else range(1)
        for replicas in range(1, 2 if self.rules.straight else count + 1):
            left = count - replicas
            behind = range(left)  # what is not first leaves a component to the stage before it
            if first:
                behind = range(0 if self.rules.fewer_machines else left, left + 1)
            for used in counts if behind else ():
                yield _Placing(replicas, used, behind, self._loads(room, replicas, used, behind))

    def _loads(self, room: _Room, replicas: int, used: int, behind: range) -> list[list[Fraction]]:
        if not self.cost.depends_on_load:
            return [[Fraction(0)]]
        if self.counting:
            devices = range(self.devices[room.level] + 1 - replicas * used)
            return [[(number + room.load) / replicas for number in devices]]
        inner = self.devices[room.level - 1]
        return [[(m * inner + room.load) / replicas] for m in behind]

    def _unfold(
        self, room: _Room, piece: tuple[int, int], used: int, cost: float
    ) -> Iterator[NestedStage]:
        """The pipeline of fewest stages for this piece that costs no more than `cost`."""
        if room.level == 0:
            yield NestedStage(())
            return
        within = cost * (1 + TIE)
        later, whole = self._pipelines(room, piece, within)
        start, end = piece
        left, offset = _Left(int(whole[:, used, start, 0].argmin()), used), 0
        while start != end:
            placing, behind, stop = self._next_stage(
                room, (start, end), left, later, within, first=not offset
            )
            share = Share(room.level, start, stop, offset, placing.replicas, first=not offset)
            m, w = placing.at(behind)
            inner = _Room(room.level - 1, placing.loads[m][w])
            inside = float(self._inside(inner, start, slice(stop, stop + 1))[placing.used, 0])
            for stage in self._unfold(inner, (start, stop), placing.used, inside):
                yield NestedStage((*stage.shares, share))
            start, left, offset = stop, behind, offset + placing.replicas

    def _next_stage(
        self,
        room: _Room,
        piece: tuple[int, int],
        left: _Left,
        later: Floats,
        within: float,
        first: bool,
    ) -> tuple[_Placing, _Left, int]:
        """The stage to begin this piece with, what it leaves to those behind, and its end."""
        after = self.cuts.after(*piece)
        stops = np.arange(len(self.cuts))[after]
        found = []
        for placing, stages in self._options(room, piece[0], after, first, within):
            behind = placing.leaves(left)
            if behind is not None:
                total = (
                    stages[placing.at(behind)] + later[behind.components, behind.devices, after, 0]
                )
                found.append((total.min(), placing, behind, int(stops[total.argmin()])))
        fewest, placing, behind, stop = min(found, key=lambda choice: choice[0])
        assert fewest < inf
        return placing, behind, stop


def _extend(best: Floats, rest: Floats, option: _Option, join: Callable[..., Floats]) -> None:
    """Lowers `best[m, w, end]` by this stage before each pipeline of `rest[m, w, stop, end]`."""
    replicas, used, behind, _ = option.placing
    devices = replicas * used
    # All m at once where that is small; else one by one, to stay within the processor's cache.
    step = len(behind) if rest.shape[3] == 1 else 1
    for low in range(0, len(behind), step):
        some = behind[low : low + step]
        cost = option.cost if len(option.cost) == 1 else option.cost[low : low + step]
        joined = join(cost[..., None], rest[some.start : some.stop, : rest.shape[1] - devices])
        target = best[some.start + replicas : some.stop + replicas, devices:]
        np.minimum(target, joined.min(axis=2), out=target)


def affordable(machines: Sequence[int], largest: int = 20_000) -> int:
    """How many cuts `Search` gets through in about half a minute, at most `largest`."""
    *inner, outer = (count * (count + 3) / 2 for count in machines)
    cuts = min(largest, (_BUDGET / outer) ** (1 / 2))
    return int(min(cuts, (3 * _BUDGET / sum(inner)) ** (1 / 3)) if inner else cuts)
