"""The divisions that are one step away from another: a cut moves, a rank changes its stage, two
stages become one, one becomes two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipedream.graph.cluster import Cluster
from pipedream.optimizer.choose.division import Division, in_order
from pipedream.optimizer.cuts.antichains import bits
from pipedream.optimizer.cuts.planning_graph import PlanningGraph

_RUNS = (2, 4, 8, 16)
"""How many nodes a cut moves over at once, besides one."""

_MOST_NODES = 8
"""Single nodes over which a cut moves, on each side."""


class Neighbours:
    """The steps for a graph on a cluster; `straight`: none that replicates a stage."""

    def __init__(self, graph: PlanningGraph, cluster: Cluster, straight: bool) -> None:
        self.graph, self.cluster, self.straight = graph, cluster, straight
        self.alike = len(cluster.machines) == 1 and not cluster.kinds

    def of(self, division: Division) -> Iterator[Division]:
        yield from self._moved_cuts(division)
        if not self.straight:
            yield from self._moved_ranks(division)
            yield from self._joined(division)
            yield from self._split(division)
        yield division._replace(more=division.more + 1)
        if division.more:
            yield division._replace(more=division.more - 1)

    def _moved_cuts(self, division: Division) -> Iterator[Division]:
        downsets = (0, *division.downsets)
        for at in range(1, len(downsets) - 1):
            before, here, after = downsets[at - 1 : at + 2]
            for moved in (*self._larger(here, after), *self._smaller(here, before)):
                changed = (*downsets[1:at], moved, *downsets[at + 1 :])
                yield division._replace(downsets=changed)

    def _larger(self, here: int, after: int) -> Iterator[int]:
        """Downsets between the two, not the second itself."""
        nodes, producers = list(bits(after & ~here)), self.graph.producer_masks
        ready = [node for node in nodes if not producers[node] & ~here]
        for node in ready[:_MOST_NODES]:
            if len(nodes) > 1:
                yield here | 1 << node
        for count in _RUNS:
            if count < len(nodes):
                yield here | sum(1 << node for node in nodes[:count])

    def _smaller(self, here: int, before: int) -> Iterator[int]:
        """Downsets between the two, not the second itself."""
        nodes, consumers = list(bits(here & ~before)), self.graph.consumer_masks
        free = [node for node in nodes if not consumers[node] & here]
        for node in free[-_MOST_NODES:]:
            if len(nodes) > 1:
                yield here & ~(1 << node)
        for count in _RUNS:
            if count < len(nodes):
                yield here & ~sum(1 << node for node in nodes[-count:])

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

    def _representatives(self, own: Sequence[int]) -> list[int]:
        """One rank of each machine, or of all if it makes no difference."""
        if self.alike:
            return [own[-1]]
        return list({self.cluster.machine(rank): rank for rank in own}.values())

    def _ordered(self, ranks: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return in_order([len(own) for own in ranks]) if self.alike else tuple(ranks)

    def _joined(self, division: Division) -> Iterator[Division]:
        downsets, ranks = division.downsets, division.ranks
        for at in range(len(ranks) - 1):
            both = ranks[at] + ranks[at + 1]
            yield Division(
                downsets[:at] + downsets[at + 1 :],
                self._ordered((*ranks[:at], both, *ranks[at + 2 :])),
                division.more,
            )

    def _split(self, division: Division) -> Iterator[Division]:
        downsets, ranks, before = division.downsets, division.ranks, 0
        for at, own in enumerate(ranks):
            nodes = list(bits(downsets[at] & ~before))
            for share in self._shares(len(own)):
                for count in self._places(nodes, share / len(own)):
                    middle = before | sum(1 << node for node in nodes[:count])
                    yield Division(
                        (*downsets[:at], middle, *downsets[at:]),
                        self._ordered((*ranks[:at], own[:share], own[share:], *ranks[at + 1 :])),
                        division.more,
                    )
            before = downsets[at]

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
