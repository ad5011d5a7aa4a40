"""The model graph: what a layer costs, and who feeds whom."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx


@dataclass(frozen=True)
class Node:
    """One layer or operator.

    `activation_bytes` holds one entry for each output tensor; `several_outputs` says that the text
    form is a list, even of one. Times in seconds, sizes in bytes, for one minibatch.
    """

    id: str
    description: str
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    activation_bytes: tuple[float, ...] = (0.0,)
    parameter_bytes: float = 0.0
    stage: int | None = None
    several_outputs: bool = False

    @property
    def is_input(self) -> bool:
        """A source of data, not of work: it costs nothing and sits in the first stage.

        `Input`, `Input0` and the like; the caller checks that nothing feeds it.
        """
        return self.description.startswith("Input")

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def output_bytes(self) -> float:
        return math.fsum(self.activation_bytes)


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of their file, and edges likewise; acyclic.

    `size_decimals` is how many decimals the text form gives to activation sizes: PipeDream's own
    profiles have three (images) or one (translation).
    """

    nodes: Mapping[str, Node]
    edges: tuple[tuple[str, str], ...]
    size_decimals: int = field(default=1, compare=False)

    @cached_property
    def predecessors(self) -> Mapping[str, tuple[str, ...]]:
        """Direct inputs of each node, in the order of the edges."""
        inputs: dict[str, list[str]] = {name: [] for name in self.nodes}
        for source, target in self.edges:
            inputs[target].append(source)
        return {name: tuple(sources) for name, sources in inputs.items()}

    @cached_property
    def successors(self) -> Mapping[str, tuple[str, ...]]:
        """Direct consumers of each node, in the order of the edges."""
        users: dict[str, list[str]] = {name: [] for name in self.nodes}
        for source, target in self.edges:
            users[source].append(target)
        return {name: tuple(targets) for name, targets in users.items()}

    @cached_property
    def order(self) -> tuple[str, ...]:
        """A topological order; ties follow the file, so it is the same for the same file.

        Raises networkx.NetworkXUnfeasible if there is a cycle (the reader refuses such a file).
        """
        position = {name: index for index, name in enumerate(self.nodes)}
        graph = self.as_networkx()
        return tuple(nx.lexicographical_topological_sort(graph, key=position.__getitem__))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the structure: descriptions and edges by topological position.

        Times, sizes and stages do not count, so a plan stays good for another batch size.
        """
        position = {name: index for index, name in enumerate(self.order)}
        lines = []
        for name in self.order:
            inputs = sorted(position[source] for source in self.predecessors[name])
            lines.append(f"{self.nodes[name].description} <- {inputs}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def as_networkx(self) -> nx.DiGraph[str]:
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(self.nodes)
        graph.add_edges_from(self.edges)
        return graph

    def with_nodes(self, nodes: Iterable[Node]) -> Graph:
        """The same structure with these nodes in place of those of the same id."""
        updated = dict(self.nodes)
        for node in nodes:
            assert node.id in updated, node.id
            updated[node.id] = node
        return replace(self, nodes=updated)

    def with_stages(self, stages: Mapping[str, int]) -> Graph:
        """The same graph with a stage for each node named in `stages`, none for the others."""
        return self.with_nodes(
            replace(node, stage=stages.get(name)) for name, node in self.nodes.items()
        )
