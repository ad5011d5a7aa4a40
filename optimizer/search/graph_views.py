"""What a request works out of its graph, once for all requests that are made of one another."""

from __future__ import annotations

from collections.abc import Mapping

from pipedream.graph.model import Graph
from pipedream.graph.plan import PlannedGraph
from pipedream.graph.profile import Footprint, Sharing
from pipedream.optimizer.cuts.planning_graph import PlanningGraph


class GraphViews:
    """Graphs as plans hold them and as searches divide them, each made when it is first needed.

    Graphs and footprints are told apart by identity: they never change, and may be large.
    """

    def __init__(self) -> None:
        self._planned: list[tuple[Graph, PlannedGraph]] = []
        self._planning: list[PlanningGraph] = []

    def planned(self, graph: Graph) -> PlannedGraph:
        """What a plan says of the graph."""
        for known, planned in self._planned:
            if known is graph:
                return planned
        made = PlannedGraph.of(graph)
        self._planned.append((graph, made))
        return made

    def planning(
        self,
        graph: Graph,
        footprints: Mapping[str, Footprint] | None,
        besides: tuple[float, float, float],
        sharing: tuple[Sharing, ...],
    ) -> PlanningGraph:
        """The graph to divide; `besides`: its seconds of update, call and reading."""
        for known in self._planning:
            alike = known.graph is graph and known.footprints is footprints
            seconds = known.update, known.call, known.reading
            if alike and seconds == besides and known.sharing == sharing:
                return known
        made = PlanningGraph.of(graph, footprints, *besides, sharing)
        self._planning.append(made)
        return made
