"""The divisions that are one step away from another: a cut moves, a rank changes its stage or is
left out or taken in, two stages become one, one becomes two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.choose.division import Division, in_order
from pipedream.optimizer.cuts.antichains import bits
from pipedream.optimizer.cuts.planning_graph import PlanningGraph

_RUNS = (2, 4, 8, 16)
"""How many nodes a cut moves over at once, besides one."""

_MOST_NODES = 8
"""Single nodes over which a cut moves, on each side."""

_MOST_EXCHANGED = 3
"""Nodes on each side of a cut that are exchanged for one another."""


class Neighbours:
    """The steps for a graph on a cluster; `straight`: none that replicates a stage."""

    def __init__(self, graph: PlanningGraph, cluster: Cluster, straight: bool) -> None:
        self.graph, self.cluster, self.straight = graph, cluster, straight
        self.alike = len(cluster.machines) == 1 and not cluster.kinds

    def of(self, division: Division) -> Iterator[Division]:
        yield from self.moved_cuts(division)
        yield from self._split(division)
        yield from self._joined(division)
        if not self.straight:
            yield from self._moved_ranks(division)
            yield from self._more_or_fewer(division)

    @staticmethod
    def in_flight(division: Division) -> Iterator[Division]:
        """The same division with more or fewer minibatches in flight."""
        yield division._replace(slack=division.slack + 1)
        yield division._replace(slack=2 * division.slack + 2)
        if division.slack:
            yield division._replace(slack=division.slack - 1)

    def moved_cuts(self, division: Division) -> Iterator[Division]:
        """The same stages on the same ranks with one cut elsewhere."""
        downsets = (0, *division.downsets)
        for at in range(1, len(downsets) - 1):
            before, here, after = downsets[at - 1 : at + 2]
            own, others = list(bits(here & ~before)), list(bits(after & ~here))
            steps = chain(
                self._with_moved(here, others, self._ready(others, here)[:_MOST_NODES]),
                self._with_moved(here, own[::-1], self._free(own, here)[-_MOST_NODES:]),
                self._exchanged(before, here, after),
            )
            for moved in steps:
                changed = (*downsets[1:at], moved, *downsets[at + 1 :])
                yield division._replace(downsets=changed)

    @staticmethod
    def _with_moved(here: int, nodes: Sequence[int], near: Sequence[int]) -> Iterator[int]:
        """Downsets with some of the `nodes` of one side on the other, but not all: one of those
        that are `near`, or the first.
        """
        if len(nodes) > 1:
            yield from (here ^ 1 << node for node in near)
        for count in _RUNS:
            if count < len(nodes):
                yield here ^ sum(1 << node for node in nodes[:count])

    def _exchanged(self, before: int, here: int, after: int) -> Iterator[int]:
        """Downsets with one node of the stage before the cut exchanged for one after it."""
        for leaves in self._free(bits(here & ~before), here)[-_MOST_EXCHANGED:]:
            for comes in self._ready(bits(after & ~here), here)[:_MOST_EXCHANGED]:
                if not self.graph.producer_masks[comes] >> leaves & 1:
                    yield here & ~(1 << leaves) | 1 << comes

    def _ready(self, nodes: Iterable[int], downset: int) -> list[int]:
        """Those of the nodes that may join the downset."""
        return [node for node in nodes if not self.graph.producer_masks[node] & ~downset]

    def _free(self, nodes: Iterable[int], downset: int) -> list[int]:
        """Those of the nodes that may leave the downset."""
        return [node for node in nodes if not self.graph.consumer_masks[node] & downset]

    def _moved_ranks(self, division: Division) -> Iterator[Division]:
        ranks = division.ranks
        for source, own in enumerate(ranks):
            for rank in self._representatives(own) if len(own) > 1 else ():
                for target in range(len(ranks)):
                    if target != source:
                        changed = list(ranks)
                        changed[source] = tuple(each for each in own if each != rank)
                        changed[target] = (*ranks[target], rank)
                        yield division._replace(ranks=self._ordered(changed))

    def _more_or_fewer(self, division: Division) -> Iterator[Division]:
        ranks = division.ranks
        spare = self._spare(ranks)
        for stage, own in enumerate(ranks):
            changes = [own[:-1]] if len(own) > 1 else []
            changes += [(*own, rank) for rank in self._representatives(spare)]
            for changed in changes:
                replaced = (*ranks[:stage], changed, *ranks[stage + 1 :])
                yield division._replace(ranks=self._ordered(replaced))

    def _representatives(self, own: Sequence[int]) -> list[int]:
        """One rank of each machine, or of all if it makes no difference."""
        if self.alike:
            return list(own[-1:])
        return list({self.cluster.machine(rank): rank for rank in own}.values())

    def _ordered(self, ranks: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return in_order([len(own) for own in ranks]) if self.alike else tuple(ranks)

    def _joined(self, division: Division) -> Iterator[Division]:
        downsets, ranks = division.downsets, division.ranks
        for at in range(len(ranks) - 1):
            both = ranks[at] + ranks[at + 1]
            for own in (both[:1],) if self.straight else (both, both[:-1]):
                yield Division(
                    downsets[:at] + downsets[at + 1 :],
                    self._ordered((*ranks[:at], own, *ranks[at + 2 :])),
                    division.slack,
                )

    def _split(self, division: Division) -> Iterator[Division]:
        """Each stage made two, which share its ranks, or of which one has a rank to spare."""
        downsets, ranks, before = division.downsets, division.ranks, 0
        spare = self._spare(ranks)[:1]
        for at, own in enumerate(ranks):
            nodes = list(bits(downsets[at] & ~before))
            pairs = [(own[:share], own[share:]) for share in self._shares(len(own))]
            if spare:
                pairs += [(own, tuple(spare)), (tuple(spare), own)]
            for first, second in pairs:
                share = len(first) / (len(first) + len(second))
                for count in self._places(nodes, share):
                    middle = before | sum(1 << node for node in nodes[:count])
                    yield Division(
                        (*downsets[:at], middle, *downsets[at:]),
                        self._ordered((*ranks[:at], first, second, *ranks[at + 1 :])),
                        division.slack,
                    )
            before = downsets[at]

    def _spare(self, ranks: Sequence[Sequence[int]]) -> list[int]:
        """The ranks without a stage."""
        used = {rank for own in ranks for rank in own}
        return [rank for rank in range(self.cluster.devices) if rank not in used]

    @staticmethod
    def _shares(count: int) -> list[int]:
        """How many of so many ranks the first of two stages may have."""
        if count <= 4:
            return list(range(1, count))
        return sorted({1, 2, count // 2, count - 2, count - 1})

    def _places(self, nodes: Sequence[int], share: float) -> list[int]:
        """After how many of the nodes to cut, so that those before it have this share of the work
        or about so much.
        """
        seconds = self.graph.compute_seconds[list(nodes)].cumsum()
        best = int((seconds < share * seconds[-1]).sum()) + 1
        near = {best - 1, best, best + 1}
        return sorted(count for count in near if 0 < count < len(nodes))
