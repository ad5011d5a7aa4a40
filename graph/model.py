"""The model graph: the cost of each layer and the edges between layers. graph.txt is its text form.

graph.txt has PipeDream's format (SOSP 2019): a line for each node, then a tab and `ID -- ID` for
each edge. Reading is lenient (blank lines, any order, missing final newline), writing canonical.
It is the only file in milliseconds.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, NoReturn

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from pipedream.graph.errors import UserError, check_kind, read_text

_TOO_LARGE = 1e100
"""An upper limit for times and sizes, so that their sums and products stay finite."""

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True)
class Node:
    """One layer or operator. Times are in seconds and sizes in bytes, for one minibatch.

    `activation_bytes` has one entry for each output tensor; with `several_outputs` the text form is
    a list, even of one entry.

    Of a backward pass that is divided in gradients of the inputs (BI) and of the parameters (BW):
    `backward_input_share`, the part that BI takes, and `kept_bytes`, what BW needs after BI.

    Of an optimizer that does not treat all parameters alike: `update_bytes`, those that it would
    update in the same time at its mean rate, and `state_bytes`, what it keeps for them.

    The text form lacks all four; None stands for what was not measured, or is as for others.
    """

    id: str
    description: str
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    activation_bytes: tuple[float, ...] = (0.0,)
    parameter_bytes: float = 0.0
    stage: int | None = None
    several_outputs: bool = False
    backward_input_share: float | None = None
    kept_bytes: float | None = None
    update_bytes: float | None = None
    state_bytes: float | None = None

    @cached_property
    def is_input(self) -> bool:
        """Tells whether this is an input of the model: free of cost, and placed in the first stage.

        Recognised by its description, such as `Input0`. The caller checks that it has no inputs.
        """
        return self.description.startswith("Input")

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def backward_input_seconds(self) -> float:
        """Returns the seconds of BI; the rest is BW. Where it was not measured, half of the
        backward pass, or all of it without parameters.
        """
        assumed = 0.5 if self.parameter_bytes else 1.0
        share = assumed if self.backward_input_share is None else self.backward_input_share
        return share * self.backward_seconds

    @property
    def updated_bytes(self) -> float:
        """Returns `update_bytes`; where that is not known, the bytes of the parameters."""
        return self.parameter_bytes if self.update_bytes is None else self.update_bytes

    @cached_property
    def output_bytes(self) -> float:
        return math.fsum(self.activation_bytes)


class NodeArrays(NamedTuple):
    """The figures of all nodes, as arrays in the order of the file.

    `place`: of each node by its name. Seconds are 0 for the model's inputs. `backward_input`:
    seconds of BI. `kept`: bytes that BW needs after BI, NaN where this was not measured.
    `updated`: `Node.updated_bytes`. `sent`, `returned`: bytes of the output, and of its gradient if
    anything before it learns. `reads`: the places of the two ends of each edge of `read_nodes`, of
    shape (2, edges).
    """

    place: Mapping[str, int]
    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    backward_input: NDArray[np.float64]
    kept: NDArray[np.float64]
    parameters: NDArray[np.float64]
    updated: NDArray[np.float64]
    sent: NDArray[np.float64]
    returned: NDArray[np.float64]
    reads: NDArray[np.int64]


@dataclass(frozen=True)
class Graph:
    """An acyclic graph; nodes and edges are in the order of the file.

    `size_decimals`: the decimals of activation sizes in the text form. PipeDream's own profiles
    have three (image models) or one (translation).
    """

    nodes: Mapping[str, Node]
    edges: tuple[tuple[str, str], ...]
    size_decimals: int = field(default=1, compare=False)

    @cached_property
    def predecessors(self) -> Mapping[str, tuple[str, ...]]:
        """Returns the direct inputs of each node, in the order of the edges."""
        return self._neighbours((target, source) for source, target in self.edges)

    @cached_property
    def successors(self) -> Mapping[str, tuple[str, ...]]:
        """Returns the direct consumers of each node, in the order of the edges."""
        return self._neighbours(self.edges)

    def _neighbours(self, pairs: Iterable[tuple[str, str]]) -> Mapping[str, tuple[str, ...]]:
        neighbours: dict[str, list[str]] = {name: [] for name in self.nodes}
        for first, second in pairs:
            neighbours[first].append(second)
        return {name: tuple(others) for name, others in neighbours.items()}

    @cached_property
    def read_nodes(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Returns the nodes whose outputs others read, with those, except the model's inputs."""
        return tuple(
            (name, readers)
            for name, readers in self.successors.items()
            if readers and not (self.nodes[name].is_input and not self.predecessors[name])
        )

    @cached_property
    def arrays(self) -> NodeArrays:
        place = {name: number for number, name in enumerate(self.nodes)}
        rows = [
            (
                0.0 if node.is_input else node.forward_seconds,
                0.0 if node.is_input else node.backward_seconds,
                0.0 if node.is_input else node.backward_input_seconds,
                np.nan if node.kept_bytes is None else node.kept_bytes,
                node.parameter_bytes,
                node.updated_bytes,
                node.output_bytes,
                node.output_bytes if name in self.learning else 0.0,
            )
            for name, node in self.nodes.items()
        ]
        reads = [(place[name], place[r]) for name, readers in self.read_nodes for r in readers]
        ends = np.array(reads, dtype=np.int64).reshape(-1, 2).T
        forward, backward, backward_input, kept, parameters, updated, sent, returned = (
            np.array(rows, dtype=np.float64).reshape(-1, 8).T
        )
        return NodeArrays(
            place,
            forward,
            backward,
            backward_input,
            kept,
            parameters,
            updated,
            sent,
            returned,
            ends,
        )

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Returns a topological order; ties are broken by the order of the file.

        Raises networkx.NetworkXUnfeasible if there is a cycle, which `read_graph` excludes.
        """
        position = {name: index for index, name in enumerate(self.nodes)}
        graph = self.as_networkx()
        return tuple(nx.lexicographical_topological_sort(graph, key=position.__getitem__))

    @cached_property
    def learning(self) -> frozenset[str]:
        """Returns the nodes through which a gradient flows: they or nodes that feed them have
        parameters or a backward pass that takes time.
        """
        learning: set[str] = set()
        for name in self.order:
            node = self.nodes[name]
            learns = node.parameter_bytes > 0 or node.backward_seconds > 0
            if learns or learning.intersection(self.predecessors[name]):
                learning.add(name)
        return frozenset(learning)

    @cached_property
    def fingerprint(self) -> str:
        """Returns a hash of the structure: descriptions, and edges by topological position.

        It leaves out times, sizes and stages, so a plan is also valid for another batch size.
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
        """Returns the same graph with nodes replaced by those of `nodes` that have the same id."""
        updated = dict(self.nodes)
        for node in nodes:
            assert node.id in updated, node.id
            updated[node.id] = node
        return replace(self, nodes=updated)

    def with_figures(self, nodes: Mapping[str, Node]) -> Graph:
        """Returns the same graph with other figures of all its nodes. What follows from edges and
        descriptions is not worked out again.
        """
        assert nodes.keys() == self.nodes.keys()
        changed = replace(self, nodes=nodes)
        for name in _OF_STRUCTURE:
            changed.__dict__[name] = getattr(self, name)
        return changed

    def with_stages(self, stages: Mapping[str, int]) -> Graph:
        """Returns the same graph with the stages given by node id; other nodes have no stage."""
        return self.with_nodes(
            replace(node, stage=stages.get(name)) for name, node in self.nodes.items()
        )


_OF_STRUCTURE = ("predecessors", "successors", "read_nodes", "order", "fingerprint")
"""What a graph works out of its edges and of what its nodes are."""


def read_graph(path: Path) -> Graph:
    """Reads graph.txt. Raises UserError `FILE:LINE: what is wrong`."""
    text = read_text(path)
    check_kind(path, text, "graph")
    return parse_graph(text, str(path))


def parse_graph(text: str, name: str = "graph.txt") -> Graph:
    """Reads the text of a graph.txt called `name`. Raises UserError `NAME:LINE: what is wrong`."""
    return _GraphTextReader(name).read(text)


def format_graph(graph: Graph) -> str:
    """Returns the canonical text: nodes, then edges, without final newline, like PipeDream's."""
    nodes = [_format_node(node, graph.size_decimals) for node in graph.nodes.values()]
    return "\n".join(nodes + [f"\t{source} -- {target}" for source, target in graph.edges])


def _format_node(node: Node, decimals: int) -> str:
    assert "\n" not in node.id + node.description, node.id
    sizes = [f"{size:.{decimals}f}" for size in node.activation_bytes]
    activation = f"[{'; '.join(sizes)}]" if node.several_outputs else sizes[0]
    stage = "" if node.stage is None else f" -- stage_id={node.stage}"
    return (
        f"{node.id} -- {node.description}"
        f" -- forward_compute_time={node.forward_seconds * 1e3:.3f},"
        f" backward_compute_time={node.backward_seconds * 1e3:.3f},"
        f" activation_size={activation}, parameter_size={node.parameter_bytes:.3f}{stage}"
    )


class _GraphTextReader:
    """Parses one file and keeps track of the line for error messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.line = 0
        self.nodes: dict[str, Node] = {}
        self.edges: dict[tuple[str, str], int] = {}
        self.decimals = 1

    def read(self, text: str) -> Graph:
        for self.line, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            if line[0].isspace():
                self._edge(line.strip())
            else:
                self._node(line.rstrip())
        if not self.nodes:
            self.fail("there is no node in this file: is it a graph.txt?")
        self._check_ends()
        graph = Graph(self.nodes, tuple(self.edges), self.decimals)
        self._check_acyclic(graph)
        return graph

    def fail(self, what: str) -> NoReturn:
        raise UserError(f"{self.name}:{max(self.line, 1)}: {what}")

    def _check_ends(self) -> None:
        for (source, target), line in self.edges.items():
            for end in (source, target):
                if end not in self.nodes:
                    self.line = line
                    self.fail(f"edge {source} -- {target}: there is no node {end}")

    def _check_acyclic(self, graph: Graph) -> None:
        try:
            cycle = nx.find_cycle(graph.as_networkx())
        except nx.NetworkXNoCycle:
            return
        self.line = self.edges[cycle[-1][0], cycle[-1][1]]
        self.fail("cycle " + " -- ".join([cycle[0][0]] + [edge[1] for edge in cycle]))

    def _edge(self, line: str) -> None:
        ends = [end.strip() for end in line.split(" -- ")]
        if len(ends) != 2 or not all(ends):
            self.fail(f"{line!r} is not an edge: write a tab and ID -- ID")
        self.edges.setdefault((ends[0], ends[1]), self.line)

    def _node(self, line: str) -> None:
        stage = None
        head, _, last = line.rpartition(" -- ")
        if last.startswith("stage_id="):
            if not last.removeprefix("stage_id=").isdecimal():
                self.fail(f"stage_id is {last.removeprefix('stage_id=')!r}, not a stage number")
            stage = int(last.removeprefix("stage_id="))
            head, _, last = head.rpartition(" -- ")
        name, separator, description = head.partition(" -- ")
        name = name.strip()
        if not separator:
            self.fail("not a node: write ID -- DESCRIPTION -- forward_compute_time=..., ...")
        if name in self.nodes:
            self.fail(f"node {name} is given twice: remove one of them")
        self.nodes[name] = self._fields(name, description, last, stage)

    def _fields(self, name: str, description: str, text: str, stage: int | None) -> Node:
        values = dict(re.findall(r"(\w+)=(\[[^\]]*\]|[^,]*)", text))
        for key in _FIELDS:
            if key not in values:
                self.fail(f"node {name}: {key} is missing")
        forward, backward, activation, parameters = (values[key].strip() for key in _FIELDS)
        several = activation.startswith("[") and activation.endswith("]")
        sizes = activation[1:-1].split(";") if several else [activation]
        self.decimals = max(self.decimals, *(len(size.partition(".")[2]) for size in sizes))
        return Node(
            id=name,
            description=description,
            forward_seconds=self._number("forward_compute_time", forward) / 1e3,
            backward_seconds=self._number("backward_compute_time", backward) / 1e3,
            activation_bytes=tuple(self._number("activation_size", size) for size in sizes),
            parameter_bytes=self._number("parameter_size", parameters),
            stage=stage,
            several_outputs=several,
        )

    def _number(self, key: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            self.fail(f"{key} is {text.strip()!r}, not a number")
        if not 0 <= value < _TOO_LARGE:
            self.fail(
                f"{key} is {text.strip()}: it must be at least 0, and less than {_TOO_LARGE:g}"
            )
        return value
