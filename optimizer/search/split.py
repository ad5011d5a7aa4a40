"""A division of the model that the user has made: where stages begin, and their replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.optimizer.cuts.planning_graph import PlanningGraph


@dataclass(frozen=True)
class Split:
    """`begins`: the node with which each stage begins, but the first; `replicas` of each stage.

    A stage has all nodes from there on, in the order of the graph, up to the next stage.
    """

    begins: tuple[str, ...]
    replicas: tuple[int, ...]

    def downsets(self, graph: PlanningGraph) -> tuple[int, ...]:
        """The nodes of each stage and those before it, as bits."""
        return tuple((1 << end) - 1 for end in self.ends(graph))

    def ends(self, graph: PlanningGraph) -> tuple[int, ...]:
        """Before which node each stage ends, by position."""
        return (*(graph.position[name] for name in self.begins), len(graph))


def split_of(
    names: Sequence[str],
    replicas: Sequence[int] | None,
    graph: Graph,
    modules: Mapping[str, str],
) -> Split:
    """The split with stages that begin at `names`: ids of nodes or paths of modules, which have a
    first node; a name for the first stage may be left out. `replicas`: 1 of each stage by default.

    Raises UserError.
    """
    planning = PlanningGraph.of(graph)
    typed = f"--split {','.join(names)}"
    places = [_first(name, typed, planning, modules) for name in names]
    if places and places[0] == 0:
        names, places = names[1:], places[1:]
    for before, (earlier, later) in enumerate(pairwise(places)):
        if later <= earlier:
            raise UserError(_backwards(typed, planning, names[before : before + 2], earlier, later))
    counts = tuple(replicas or (1,) * (len(places) + 1))
    shown = ",".join(map(str, counts))
    if len(counts) != len(places) + 1:
        raise UserError(
            f"--replicas {shown}: {len(counts)} numbers for the {len(places) + 1} stages of"
            f" {typed if names else 'a plan without --split'}: give one for each stage"
        )
    return Split(tuple(planning.names[place] for place in places), counts)


def _first(name: str, typed: str, planning: PlanningGraph, modules: Mapping[str, str]) -> int:
    """The position of a node, or of the first one of a module."""
    if name in planning.position:
        return planning.position[name]
    inside = [
        place
        for place, node in enumerate(planning.names)
        if modules.get(node, "") == name or modules.get(node, "").startswith(f"{name}.")
    ]
    if inside:
        return inside[0]
    if name in planning.follows:
        leader = planning.follows[name]
        return 0 if leader is None else planning.position[leader]
    known = {*planning.names, *(path for own in modules.values() for path in _ancestry(own))}
    raise UserError(f"{typed}: {_unknown(name, known, modules)}")


def _ancestry(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1) if path]


def _unknown(name: str, known: Collection[str], modules: Mapping[str, str]) -> str:
    ends = sorted((path for path in known if path.endswith(f".{name}")), key=len)
    close = [*ends[:3], *get_close_matches(name, sorted(known), n=3)][:3]
    if not modules:
        return f"no node is called {name}; names of modules are in profile.json beside the graph"
    hint = f"did you mean {' or '.join(close)}?" if close else "graph.txt and layers.csv name them"
    return f"no node or module is called {name}; {hint}"


def _backwards(
    typed: str, planning: PlanningGraph, names: Sequence[str], earlier: int, later: int
) -> str:
    """Why the second of two stages cannot begin before the first."""
    first, second = names
    if earlier == later:
        return f"{typed}: {first} and {second} both begin with {planning.names[later]}"
    source = _edge(planning, later, earlier)
    if source is None:
        return f"{typed}: {second} comes before {first} in the graph: write {second},{first}"
    return (
        f"{typed}: {planning.names[source]} feeds {planning.names[earlier]}, so {second} comes"
        f" before {first} and cannot be in a later stage: write {second},{first}"
    )


def _edge(planning: PlanningGraph, start: int, end: int) -> int | None:
    """The last node before `end` on a way from `start` to it; None if there is no way."""
    reached = {start}
    for node in range(start + 1, end):
        if reached.intersection(planning.producers[node]):
            reached.add(node)
    return max(reached.intersection(planning.producers[end]), default=None)
