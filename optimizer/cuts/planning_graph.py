"""The part of a model graph that a plan divides: its working nodes, as bits and arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipedream.graph.model import Graph
from pipedream.graph.profile import Footprint, Sharing

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class PlanningGraph:
    """The nodes that a plan divides, numbered in topological order.

    Sources called `Input` cost nothing and are left out: they go to the first stage. A
    `__getitem__` that nothing consumes is left out as well and goes where its producer goes:
    `follows` names the working node, None for one that reads an input. `footprints` say what each
    node keeps in memory [default: its outputs]. Seconds per minibatch: `update`, per byte that
    is updated; `summing`, per byte of parameters; `call`, in every stage; `reading`, in the first
    and the last stage, which read it. `sharing`: parameters that several nodes read. With `groups`,
    of which each has one exit, those are the nodes to divide: named by their exits, with all they
    do.
    """

    graph: Graph
    names: tuple[str, ...]
    follows: Mapping[str, str | None]
    footprints: Mapping[str, Footprint] | None = None
    update: float = 0.0
    call: float = 0.0
    reading: float = 0.0
    sharing: tuple[Sharing, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    summing: float = 0.0

    @staticmethod
    def of(
        graph: Graph,
        footprints: Mapping[str, Footprint] | None = None,
        update: float = 0.0,
        call: float = 0.0,
        reading: float = 0.0,
        sharing: tuple[Sharing, ...] = (),
        groups: tuple[tuple[str, ...], ...] = (),
        summing: float = 0.0,
    ) -> PlanningGraph:
        inputs = {
            name
            for name, node in graph.nodes.items()
            if node.is_input and not graph.predecessors[name]
        }
        unread: set[str] = set()
        for name in reversed(graph.order):
            consumed = not unread.issuperset(graph.successors[name])
            getitem = graph.nodes[name].description.startswith("__getitem__")
            if getitem and name not in inputs and not consumed:
                unread.add(name)
        inner = {name: own[-1] for own in groups for name in own[:-1]}
        left_out = inputs | unread | inner.keys()
        names = tuple(name for name in graph.order if name not in left_out)
        follows: dict[str, str | None] = dict.fromkeys(inputs)
        follows |= inner
        for name in graph.order:
            if name in unread:
                producer = graph.predecessors[name][0] if graph.predecessors[name] else None
                follows[name] = producer if producer is None else follows.get(producer, producer)
        number = {name: k for k, own in enumerate(groups) for name in own}
        read = ((name, reader) for name in inner for reader in graph.successors[name])
        assert all(
            reader in unread or number.get(reader) == number[name] for name, reader in read
        ), "a group has several exits"
        figures = footprints, update, call, reading
        return PlanningGraph(graph, names, follows, *figures, sharing, groups, summing)

    def priced_as(self, graph: Graph, footprints: Mapping[str, Footprint] | None) -> PlanningGraph:
        """The same nodes with the figures of a graph of the same structure."""
        changed = replace(self, graph=graph, footprints=footprints)
        for name in (
            "members",
            "position",
            "consumers",
            "producers",
            "consumer_masks",
            "producer_masks",
        ):
            changed.__dict__[name] = getattr(self, name)
        return changed

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def members(self) -> tuple[tuple[str, ...], ...]:
        """The nodes of the graph in each, the exit last."""
        known = {own[-1]: own for own in self.groups}
        return tuple(known.get(name, (name,)) for name in self.names)

    @cached_property
    def position(self) -> dict[str, int]:
        return {name: index for index, own in enumerate(self.members) for name in own}

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """The working nodes that read each node's output."""
        return tuple(self._neighbours(self.graph.successors[name]) for name in self.names)

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """The working nodes whose output each node reads."""
        read = ([n for name in own for n in self.graph.predecessors[name]] for own in self.members)
        return tuple(
            tuple(place for place in self._neighbours(names) if place != own)
            for own, names in enumerate(read)
        )

    @cached_property
    def consumer_masks(self) -> tuple[int, ...]:
        """`consumers` as bits, node 0 lowest."""
        return tuple(sum(1 << node for node in nodes) for nodes in self.consumers)

    @cached_property
    def producer_masks(self) -> tuple[int, ...]:
        """`producers` as bits, node 0 lowest."""
        return tuple(sum(1 << node for node in nodes) for nodes in self.producers)

    def _neighbours(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(sorted({self.position[name] for name in names if name in self.position}))

    def _sums(self, of_node: Mapping[str, float]) -> Floats:
        return np.array([sum(of_node[name] for name in own) for own in self.members])

    @cached_property
    def compute_seconds(self) -> Floats:
        """Forward plus backward of each node, one minibatch on one worker."""
        return self._sums({n: node.compute_seconds for n, node in self.graph.nodes.items()})

    @cached_property
    def work_seconds(self) -> Floats:
        """Compute seconds plus the update of the node's parameters."""
        return self.compute_seconds + self.update_seconds

    @cached_property
    def update_seconds(self) -> Floats:
        """Of each node's parameters: updates, and sums of their gradients."""
        updated = self._sums({n: node.updated_bytes for n, node in self.graph.nodes.items()})
        return updated * self.update + self.parameter_bytes * self.summing

    @cached_property
    def state_bytes(self) -> Floats | None:
        """What the optimizer keeps for each node's parameters; None if that is not known of all
        that have any.
        """
        of_node = {name: node.state_bytes for name, node in self.graph.nodes.items()}
        if any(
            of_node[name] is None and node.parameter_bytes
            for name, node in self.graph.nodes.items()
        ):
            return None
        return self._sums({name: size or 0.0 for name, size in of_node.items()})

    @cached_property
    def parameter_bytes(self) -> Floats:
        return self._sums({n: node.parameter_bytes for n, node in self.graph.nodes.items()})

    @cached_property
    def output_bytes(self) -> Floats:
        return np.array([self.graph.nodes[name].output_bytes for name in self.names])

    @cached_property
    def forward_seconds(self) -> Floats:
        return self._sums({n: node.forward_seconds for n, node in self.graph.nodes.items()})

    @cached_property
    def saved_bytes(self) -> Floats:
        """Bytes that each node keeps for the backward pass.

        A loss is assumed to save as much as it reads: the model's outputs once more.
        """
        if self.footprints is None:
            return self._sums({n: node.output_bytes for n, node in self.graph.nodes.items()})
        returned = np.array([not readers for readers in self.consumers])
        drawn = self._sums({name: each.drawn for name, each in self.footprints.items()})
        return self.own_saved_bytes + drawn + np.where(returned, self.output_bytes, 0.0)

    @cached_property
    def own_saved_bytes(self) -> Floats:
        """The same without what a loss saves, and random numbers: what can be made again."""
        if self.footprints is None:
            read = np.array([bool(readers) for readers in self.consumers])
            return np.where(read, self.saved_bytes, 0.0)
        made = {name: each.saved - each.drawn for name, each in self.footprints.items()}
        return self._sums(made)

    @cached_property
    def keeps_output(self) -> NDArray[np.bool_]:
        """Whether what can be made again of a node is its output, at least: so in the model as a
        whole, whatever a device of a mesh has of it.
        """
        whole = self.own_saved_bytes
        if self.footprints is not None:
            of_node = self.footprints.items()
            whole = self._sums({n: f.saved / (f.share or 1.0) - f.drawn for n, f in of_node})
        return np.asarray(whole >= self.output_bytes * (1 - 1e-9))

    @cached_property
    def workspace_bytes(self) -> Floats:
        """Bytes that each node's backward pass needs besides that, at least its gradients."""
        if self.footprints is None:
            return self.parameter_bytes
        of_node = {name: each.workspace for name, each in self.footprints.items()}
        return np.array([max(of_node[name] for name in own) for own in self.members])

    @cached_property
    def basis_bytes(self) -> Floats:
        """Bytes of bases of each node's parameters, with basis rotation."""
        assert self.footprints is not None, "a profile knows them"
        return self._sums({name: each.bases for name, each in self.footprints.items()})

    @cached_property
    def basis_workspace_bytes(self) -> Floats:
        """Bytes that finding the bases of one of each node's parameters needs for a while."""
        assert self.footprints is not None, "a profile knows them"
        of_node = {name: each.finding for name, each in self.footprints.items()}
        return np.array([max(of_node[name] for name in own) for own in self.members])

    @cached_property
    def model_inputs(self) -> tuple[tuple[float, tuple[int, ...]], ...]:
        """For each input of the model: its bytes, and the nodes that read it."""
        return tuple(
            (footprint.input_bytes, self._neighbours(self.graph.successors[name]))
            for name, footprint in (self.footprints or {}).items()
            if footprint.input_bytes and name in self.follows
        )

    @cached_property
    def shared(self) -> tuple[tuple[float, tuple[int, ...]], ...]:
        """For each parameter that several nodes read: its bytes, and these nodes."""
        return tuple((each.bytes, self._neighbours(each.nodes)) for each in self.sharing)

    @cached_property
    def shared_masks(self) -> tuple[int, ...]:
        """The nodes of `shared` as bits."""
        return tuple(sum(1 << node for node in nodes) for _, nodes in self.shared)

    def keeps_together(self, downset: int) -> bool:
        """Whether no parameter is read on both sides of the cut."""
        return all(downset & mask in (0, mask) for mask in self.shared_masks)

    def stage_of(self, stages: Sequence[Sequence[int]]) -> dict[str, int]:
        """The stage of every node of the graph, given the working nodes of each stage."""
        stage_of = {self.names[node]: stage for stage, nodes in enumerate(stages) for node in nodes}
        for name, leader in self.follows.items():
            stage_of[name] = 0 if leader is None else stage_of[leader]
        return stage_of
