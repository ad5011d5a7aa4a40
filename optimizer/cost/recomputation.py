"""Selective recomputation: which nodes of a stage run again, the cheapest seconds per byte first.

As in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
with nodes of any kind. A node that runs again keeps nothing for the backward pass. It reads what
other nodes keep, and what keeps no memory of its own, such as the output of a product of matrices
that is added to something, is made again along with it: its `cone`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import Floats, PlanningGraph

CLASSES = 8
"""Classes of nodes by seconds per byte, from which a search takes whole ones."""

_STEPS = 16
"""Numbers of nodes of which the smallest that is enough is looked for first; and expensive nodes
that are tried to be left out."""


@dataclass(frozen=True)
class Offloaded:
    """What a stage saves is moved to the memory of the host meanwhile: `seconds` of a minibatch in
    one direction, beside the passes, as if on the device that was profiled.
    """

    seconds: float


Recomputed: TypeAlias = bool | tuple[int, ...] | Offloaded
"""Whether a stage recomputes as a whole, or the nodes that it does; or what it does instead."""

OFFLOADED_SETS = 2
"""Minibatches of which a device holds what they have saved, if that is moved to the host: one goes
backward while the one before leaves or the next arrives.
"""


def compute_seconds(graph: PlanningGraph, nodes: Sequence[int], recompute: Recomputed) -> float:
    """Forward plus backward of these nodes on one worker; with `recompute` a second forward pass of
    all or some, or copies beside the passes, if these take longer.
    """
    inside = list(nodes)
    if isinstance(recompute, Offloaded):
        return max(float(graph.compute_seconds[inside].sum()), recompute.seconds)
    again = list(nodes if recompute is True else recompute or ())
    second_forward = graph.forward_seconds[again].sum()
    return float(graph.compute_seconds[inside].sum() + second_forward)


class Recomputable:
    """What each node saves, and how long it takes to make that again.

    `saved_bytes`: without what a loss saves, which is not made again. `cones[n]`: node n and those
    that run with it; `kept[n]`: whether its output is kept anyway. Nodes that save nothing are not
    recomputed on their own. `classes`: by seconds per byte, of about as many bytes each.
    """

    def __init__(self, graph: PlanningGraph) -> None:
        self.graph = graph
        self.saved_bytes = graph.own_saved_bytes
        self.kept = graph.keeps_output
        self.cones = self._cones()
        self.seconds = np.array([graph.forward_seconds[list(cone)].sum() for cone in self.cones])
        useful = self.saved_bytes > 0
        useful[self._boundaries()] = False
        nodes = np.flatnonzero(useful)
        rate = self.seconds[nodes] / self.saved_bytes[nodes]
        self.order: Sequence[int] = nodes[np.argsort(rate, kind="stable")].tolist()
        self.classes = self._classes()

    def _boundaries(self) -> list[int]:
        """Nodes that are always kept, so that what lies between two of them can be made again
        without all that lies before: of n nodes that alone are read later on about sqrt(n), as in
        Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
        """
        last_read = 0
        alone: list[int] = []
        for node, readers in enumerate(self.graph.consumers):
            if last_read <= node and self.kept[node] and readers and self.saved_bytes[node] > 0:
                alone.append(node)
            last_read = max(last_read, *readers, 0)
        before = np.cumsum(self.saved_bytes)[alone]
        count = round(len(alone) ** 0.5)
        places = np.searchsorted(before, before[-1:] * np.arange(1, count) / max(1, count))
        return sorted({alone[place] for place in places.tolist()})

    def _classes(self) -> list[set[int]]:
        """The nodes of each class and of cheaper ones."""
        whole = np.cumsum(self.saved_bytes[self.order])
        shares = np.arange(1, CLASSES + 1) / CLASSES * (1 - 1e-12) if self.order else ()
        return [
            set(self.order[: int(np.searchsorted(whole, share * whole[-1])) + 1])
            for share in shares
        ]

    def _cones(self) -> list[tuple[int, ...]]:
        cones: list[tuple[int, ...]] = []
        for node, producers in enumerate(self.graph.producers):
            members = {node}.union(*(cones[p] for p in producers if not self.kept[p]))
            cones.append(tuple(sorted(members)))
        return cones

    def closed(self, nodes: Collection[int], inside: Collection[int]) -> tuple[int, ...]:
        """Returns the nodes with their cones, as far as these are `inside` of a stage; what earlier
        stages have made is kept.
        """
        members, inside = set[int](), frozenset(inside)
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in members and node in inside:
                members.add(node)
                waiting += (p for p in self.graph.producers[node] if not self.kept[p])
        return tuple(sorted(members))

    def choose(
        self, inside: Collection[int], enough: Callable[[tuple[int, ...]], bool]
    ) -> tuple[int, ...] | None:
        """Returns nodes of a stage that are `enough` to recompute: the cheapest first, without
        those that turn out not to be needed. None if no number of them is.

        Where nodes have no cones, and each frees what it saves, this takes at most one node's time
        more than the best choice.
        """
        inside = frozenset(inside)
        order = [node for node in self.order if node in inside]

        def first(count: int) -> tuple[int, ...]:
            return self.closed(order[:count], inside)

        shares = {round(len(order) * share / _STEPS) for share in range(1, _STEPS + 1)}
        counts = sorted(shares | {sum(node in each for node in order) for each in self.classes})
        most = next((count for count in counts if enough(first(count))), None)
        if most is None:
            return None
        least = max((count for count in counts if count < most), default=0)
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if enough(first(middle)) else (middle, most)
        chosen = order[:most]
        for node in sorted(chosen, key=self.seconds.__getitem__, reverse=True)[:_STEPS]:
            fewer = [other for other in chosen if other != node]
            if enough(self.closed(fewer, inside)):
                chosen = fewer
        return self.closed(chosen, inside)

    def made_again(self, inside: Sequence[int], nodes: Collection[int]) -> Floats:
        """[node of `inside`]: the bytes that `nodes` have made again, at most, when the backward
        pass of a stage is at a node; `inside` in the order of the forward pass.

        Adjacent nodes run together, as soon as a backward pass needs what one of them makes, or
        others that run again do. What they have made is counted until their own backward passes.
        """
        place, nodes = {node: at for at, node in enumerate(inside)}, frozenset(nodes)
        runs = [
            [at for _, at in run]
            for again, run in groupby(
                ((node in nodes, at) for at, node in enumerate(inside)), key=itemgetter(0)
            )
            if again
        ]
        until, change = dict[int, int](), np.zeros(len(inside) + 1)
        for run in reversed(runs):
            readers = {r for at in run for r in self.graph.consumers[inside[at]] if r in place}
            end = max(
                until.get(place[reader], place[reader]) for reader in readers | {inside[run[-1]]}
            )
            until.update(dict.fromkeys(run, end))
            amount = self.saved_bytes[[inside[at] for at in run]].sum()
            change[run[0]] += amount
            change[end + 1] -= amount
        return np.maximum(np.cumsum(change)[:-1], 0.0)


@lru_cache(maxsize=4)
def recomputable(graph: PlanningGraph) -> Recomputable:
    return Recomputable(graph)


class RecomputationClasses:
    """The cheapest nodes of all stages between two cuts, as classes by seconds per byte, which save
    about as many bytes each.

    `members[k, node]`: 1.0 for the nodes of classes 0 to k.
    """

    def __init__(self, cuts: Cuts) -> None:
        self.cuts = cuts
        self.nodes = recomputable(cuts.graph)
        self.members: list[Floats] = []
        for own in self.nodes.classes:
            members = np.zeros(len(cuts.graph))
            members[list(own)] = 1.0
            self.members.append(members)

    @cached_property
    def seconds(self) -> list[Floats]:
        """[state] of each class: seconds of its nodes before the cut, and of those of cheaper ones.
        Cones that share nodes are counted as if they did not: never too little.
        """
        return [self.cuts.sum(members * self.nodes.seconds) for members in self.members]

    @cached_property
    def made_again(self) -> list[float]:
        """Of each class: bytes that a backward pass has made again at once, at most."""
        every = range(len(self.cuts.graph))
        return [
            float(
                self.nodes.made_again(
                    every, self.nodes.closed(np.flatnonzero(members).tolist(), every)
                ).max()
            )
            for members in self.members
        ]
