"""What lies before and across each cut of a family of downsets, and between two nested ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipedream.optimizer.planning import Floats, Ints, PlanningGraph

States: TypeAlias = slice | Ints


class Cuts:
    """The states of a search: downsets of `graph`, each after all those it contains.

    The first is empty, the last the whole graph. A stage is the difference of two nested ones;
    `start` and `end` below are their positions. Arrays have one entry for each state.
    """

    def __init__(self, graph: PlanningGraph, downsets: Sequence[int]) -> None:
        assert downsets[0] == 0
        assert downsets[-1] == (1 << len(graph)) - 1
        self.graph = graph
        self.downsets = downsets
        width = -(-len(graph) // 64) * 8
        packed = b"".join(downset.to_bytes(width, "little") for downset in downsets)
        raw = np.frombuffer(packed, dtype=np.uint8).reshape(len(downsets), width)
        self._words = np.ascontiguousarray(raw).view("<u8")
        self._last_read: tuple[int, Floats] = (-1, np.empty(0))
        self._last_given: tuple[int, Floats] = (-1, np.empty(0))
        self._holds = np.unpackbits(raw, axis=1, count=len(graph), bitorder="little").T.astype(bool)

    def __len__(self) -> int:
        return len(self.downsets)

    @cached_property
    def seconds(self) -> Floats:
        """Forward plus backward of all nodes before the cut, on one worker."""
        return self.sum(self.graph.compute_seconds)

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
        """Bytes of the tensors alive across the cut, each once however many read it."""
        return self.sum(self.graph.output_bytes, self._live)

    @cached_property
    def _live(self) -> NDArray[np.bool_]:
        """[node, state]: before the cut, and read by some node after it."""
        live = np.zeros_like(self._holds)
        for node, readers in enumerate(self.graph.consumers):
            if readers:
                live[node] = self._holds[node] & ~self._holds[list(readers)].all(axis=0)
        return live

    def sum(self, values: Floats, among: NDArray[np.bool_] | None = None) -> Floats:
        """For each state the sum of `values` over the nodes before it, or over those `among`."""
        among = self._holds if among is None else among
        total = np.zeros(len(self))
        for value, member in zip(values, among, strict=True):
            if value:
                total[member] += value
        return total

    def after(self, start: int, end: int) -> States:
        """The states up to `end` that hold all of `start` and more; a slice where none does not."""
        here = self._words[start]
        nested = ((self._words[start + 1 : end + 1] & here) == here).all(axis=1)
        return slice(start + 1, end + 1) if nested.all() else np.flatnonzero(nested) + start + 1

    def nodes(self, start: int, end: int) -> tuple[int, ...]:
        """The nodes of a stage, in topological order."""
        return tuple(np.flatnonzero(self._holds[:, end] & ~self._holds[:, start]).tolist())

    def bytes_read(self, start: int) -> Floats:
        """For each state that the stage from `start` may end at: what it reads from before."""
        if self._last_read[0] != start:  # a search asks many times in a row
            self._last_read = (start, self._bytes_read(start))
        return self._last_read[1]

    def _bytes_read(self, start: int) -> Floats:
        total = np.zeros(len(self))
        for node in np.flatnonzero(self._live[:, start]):
            readers = [n for n in self.graph.consumers[node] if not self._holds[n, start]]
            total[self._holds[readers].any(axis=0)] += self.graph.output_bytes[node]
        return total

    def bytes_given(self, start: int) -> Floats:
        """For each state that the stage from `start` may end at: the model's inputs it reads."""
        if self._last_given[0] != start:
            self._last_given = (start, self._bytes_given(start))
        return self._last_given[1]

    def _bytes_given(self, start: int) -> Floats:
        total = np.zeros(len(self))
        for size, consumers in self.graph.given:
            readers = [n for n in consumers if not self._holds[n, start]]
            if readers:
                total[self._holds[readers].any(axis=0)] += size
        return total
