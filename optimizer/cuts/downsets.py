"""Sums before, across and between the cuts of a family of downsets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipedream.optimizer.cuts.planning_graph import Floats, Ints, PlanningGraph

States: TypeAlias = slice | Ints

_FEW = 64
"""Of no more sets, as those of one plan, members are looked at one by one."""


class Cuts:
    """The states of a search: downsets of `graph`, each after all those it contains.

    A cut divides the nodes into a downset and the others; a state is the position of a downset in
    this family. The first is empty, the last the whole graph. A stage is the difference of two
    nested ones, of states `start` and `end` below. Arrays have one entry for each state.
    """

    def __init__(self, graph: PlanningGraph, downsets: Sequence[int]) -> None:
        assert downsets[0] == 0
        assert downsets[-1] == (1 << len(graph)) - 1
        self.graph = graph
        self.downsets = downsets
        width = -(-len(graph) // 64) * 8
        packed = b"".join(downset.to_bytes(width, "little") for downset in downsets)
        self._bytes = np.frombuffer(packed, dtype=np.uint8).reshape(len(downsets), width)
        self.words: NDArray[np.uint64] = self._bytes.view("<u8")
        self._last_received: tuple[int, Floats] = (-1, np.empty(0))

    def __len__(self) -> int:
        return len(self.downsets)

    def subset(self, states: Iterable[int]) -> Cuts:
        """The family of these states alone, in their order."""
        return Cuts(self.graph, [self.downsets[state] for state in states])

    @cached_property
    def seconds(self) -> Floats:
        """Forward, backward and update of all nodes before the cut, on one worker."""
        return self.sum(self.graph.work_seconds)

    def stage_overhead(self, start: int) -> Floats:
        """Seconds of a stage from `start` to each state besides its nodes."""
        return self._overheads[min(start, 1)]

    @cached_property
    def _overheads(self) -> tuple[Floats, Floats]:
        """Those of the first stage, and of later ones."""
        first = np.full(len(self), self.graph.call + self.graph.reading)
        later = np.full(len(self), self.graph.call)
        later[-1] += self.graph.reading
        return first, later

    @cached_property
    def working(self) -> Floats:
        """How many nodes before the cut take any time."""
        return self.sum((self.graph.compute_seconds > 0).astype(np.float64))

    @cached_property
    def parameter_bytes(self) -> Floats:
        return self.sum(self.graph.parameter_bytes)

    @cached_property
    def forward_seconds(self) -> Floats:
        return self.sum(self.graph.forward_seconds)

    @cached_property
    def bytes_across(self) -> Floats:
        """Bytes of the tensors alive across the cut, each counted once."""
        live = self.words & self._read_after
        return _sum(live.view(np.uint8), self.graph.output_bytes)

    @cached_property
    def _read_after(self) -> NDArray[np.uint64]:
        """[state, word]: the nodes, as bits, that some node after the cut reads."""
        if len(self) <= _FEW:
            return self._packed(self._reads_of_few())
        masks = self.graph.producer_masks
        width = self.words.shape[1] * 8
        read_after = np.zeros_like(self.words)
        for place, column in enumerate(self._bytes.T):
            eight = b"".join(mask.to_bytes(width, "little") for mask in masks[8 * place :][:8])
            read = np.frombuffer(eight, dtype="<u8").reshape(-1, width // 8)
            words = np.flatnonzero(read.any(axis=0))
            if len(words):
                read_after[:, words] |= _by_byte(np.bitwise_or, read[:, words])[~column]
        return read_after

    def _reads_of_few(self) -> NDArray[np.bool_]:
        """[node, state]: whether some node after the cut reads the node."""
        reads, after = np.zeros_like(self.holds), ~self.holds
        own = [node for node, nodes in enumerate(self.graph.consumers) if nodes]
        if own:
            counts = [len(self.graph.consumers[node]) for node in own]
            first = np.concatenate([[0], np.cumsum(counts[:-1], dtype=np.intp)])
            readers = np.concatenate([self.graph.consumers[node] for node in own])
            reads[own] = np.logical_or.reduceat(after[readers], first, axis=0)
        return reads

    def _packed(self, members: NDArray[np.bool_]) -> NDArray[np.uint64]:
        """[state, word]: of [node, state], as `words`."""
        words = np.zeros_like(self.words)
        packed = np.packbits(members.T, axis=1, bitorder="little")
        words.view(np.uint8)[:, : packed.shape[1]] = packed
        return words

    @cached_property
    def holds(self) -> NDArray[np.bool_]:
        """[node, state]: whether the node is before the cut."""
        count = len(self.graph)
        holds = np.unpackbits(self._bytes, axis=1, count=count, bitorder="little")
        return holds.T.astype(np.bool_)

    def sum(self, values: Floats) -> Floats:
        """For each state the sum of `values` over the nodes before the cut."""
        return _sum(self._bytes, values)

    def after(self, start: int, end: int) -> States:
        """The states up to `end` that contain `start`; a slice if all in between do."""
        here = self.words[start]
        nested = ((self.words[start + 1 : end + 1] & here) == here).all(axis=1)
        return slice(start + 1, end + 1) if nested.all() else np.flatnonzero(nested) + start + 1

    def nodes(self, start: int, end: int) -> tuple[int, ...]:
        """The nodes of a stage, in topological order."""
        return tuple(np.flatnonzero(self.holds[:, end] & ~self.holds[:, start]).tolist())

    def bytes_received(self, start: int) -> Floats:
        """[state]: bytes that the stage from `start` to the state reads: from earlier stages, and
        of the model's inputs.
        """
        if self._last_received[0] != start:  # a search asks many times in a row
            self._last_received = start, self.bytes_read(start) + self.bytes_input(start)
        return self._last_received[1]

    def bytes_input(self, start: int) -> Floats:
        """[state]: bytes of the model's inputs that the stage from `start` to the state reads."""
        return self._read_by(start, self.graph.model_inputs)

    def bytes_read(self, start: int) -> Floats:
        """[state]: bytes that the stage from `start` to the state reads from earlier stages."""
        after = self._read_after[start].view(np.uint8)
        live = np.unpackbits(after, count=len(self.graph), bitorder="little")
        before = np.flatnonzero(live & self.holds[:, start])
        outputs, consumers = self.graph.output_bytes, self.graph.consumers
        return self._read_by(start, ((float(outputs[node]), consumers[node]) for node in before))

    def copied_bytes(self, start: int) -> Floats:
        """[state]: bytes of parameters that the stage from `start` to the state reads and that are
        counted at an earlier node, in another stage.
        """
        shared = (
            (size, nodes[1:]) for size, nodes in self.graph.shared if self.holds[nodes[0], start]
        )
        return self._read_by(start, shared)

    def _read_by(self, start: int, tensors: Iterable[tuple[float, Sequence[int]]]) -> Floats:
        """[state]: of tensors, given as bytes and readers, what the stage from `start` reads."""
        total = np.zeros(len(self))
        for size, nodes in tensors:
            readers = [node for node in nodes if not self.holds[node, start]]
            if readers:
                total[self.holds[readers].any(axis=0)] += size
        return total


def _sum(sets: NDArray[np.uint8], values: Floats) -> Floats:
    """For each set, a row of bits, the sum of the values of its members.

    In the same order in every row, and eight at a time if there are many, so that rounding never
    makes the sum of a set smaller than that of a subset.
    """
    if len(sets) <= _FEW and len(values):
        members = np.unpackbits(sets, axis=1, count=len(values), bitorder="little")
        return np.asarray(np.cumsum(np.where(members, values, 0.0), axis=1)[:, -1])
    total = np.zeros(len(sets))
    for place, column in enumerate(sets.T):
        eight = values[8 * place :][:8]
        if eight.any():
            total += _by_byte(np.add, eight)[column]
    return total


def _by_byte(join: np.ufunc, eight: NDArray[Any]) -> NDArray[Any]:
    """[byte, ...]: `join` over those of up to eight values whose bits are set."""
    table = np.zeros((1, *eight.shape[1:]), eight.dtype)
    for value in eight:
        table = np.concatenate([table, join(table, value)])
    return np.concatenate([table] * (256 // len(table)))
