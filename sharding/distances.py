"""The seconds from every placement of a tensor to every other one, all at once.

What `redistribution` finds for one pair by Dijkstra's algorithm, with the steps: here shortest
paths over a matrix of steps, for a search that compares all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import permutations, product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipedream.graph.placements.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
)
from pipedream.sharding.steps import (
    MeshTensor,
    can_be_placed,
    elements_held,
    is_free,
    ring_rounds,
    sent_bytes,
)

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Distances:
    """The seconds of the cheapest steps between placements of a tensor.

    Work and memory: the cube and the square of the number of placements, once for each set of
    numbers of chunks at the ends of a path (`redistribute` goes through no others).
    """

    tensor: MeshTensor
    _known: dict[tuple[int, ...], tuple[dict[Placements, int], Floats]] = field(
        default_factory=dict, init=False, repr=False
    )
    _sent: dict[tuple[Placements, Placements], tuple[int, int]] = field(
        default_factory=dict, init=False, repr=False
    )
    """Bytes and rounds of a step, which belongs to many sets of numbers of chunks."""

    def seconds(self, sources: tuple[Placements, ...], targets: tuple[Placements, ...]) -> Floats:
        """[source, target]: as `redistribute` takes. All must be possible placements."""
        table = np.zeros((len(sources), len(targets)))
        for of_sources, rows in _by_chunks(sources).items():
            for of_targets, columns in _by_chunks(targets).items():
                number, matrix = self._matrix(tuple(sorted({1, *of_sources, *of_targets})))
                from_ = np.array([number[sources[k]] for k in rows])
                to = np.array([number[targets[k]] for k in columns])
                table[rows[:, None], columns] = matrix[from_[:, None], to]
        return table

    def _matrix(self, chunks: tuple[int, ...]) -> tuple[dict[Placements, int], Floats]:
        """The number of each placement with these chunks, and the seconds between all."""
        if chunks not in self._known:
            number = {each: k for k, each in enumerate(_placements(self.tensor, chunks))}
            matrix = np.full((len(number), len(number)), np.inf)
            np.fill_diagonal(matrix, 0.0)
            for steps in self._steps_by_axis(number):
                matrix[steps.sources, steps.targets] = steps.seconds
            # D[s, t] = min(D[s, t], D[s, k] + D[k, t]) for k = 0, 1, ... (Floyd and Warshall)
            for middle in range(len(number)):
                np.minimum(matrix, matrix[:, middle, None] + matrix[middle], out=matrix)
            self._known[chunks] = number, matrix
        return self._known[chunks]

    def _steps_by_axis(self, number: dict[Placements, int]) -> Iterator[_AxisSteps]:
        """The steps that `make_step` makes, with what depends on one end alone computed once."""
        tensor = self.tensor
        held = [elements_held(tensor.shape, tensor.mesh, each) for each in number]
        for axis, link in enumerate(tensor.links):
            sources, targets, sent, rounds = [], [], [], []
            for ends in _pairs(tensor, number, axis):
                source, target = number[ends[0]], number[ends[1]]
                if ends not in self._sent:
                    collective, size = sent_bytes(tensor, *ends, axis, held[source], held[target])
                    self._sent[ends] = size, ring_rounds(collective, tensor.mesh[axis])
                size, count = self._sent[ends]
                sources.append(source)
                targets.append(target)
                sent.append(size)
                rounds.append(count)
            counts = np.array(rounds, dtype=np.float64)
            per_round = np.array(sent) / np.maximum(counts, 1.0)  # 0 on an axis of one device
            yield _AxisSteps(sources, targets, counts * link.seconds(per_round))


@lru_cache(maxsize=10_000)
def distances(tensor: MeshTensor) -> Distances:
    """The distances of this type of tensor, kept for all that ask."""
    return Distances(tensor)


@dataclass(frozen=True)
class _AxisSteps:
    """All steps on one axis: numbers of the placements at their ends, and their seconds."""

    sources: list[int]
    targets: list[int]
    seconds: Floats


@lru_cache(maxsize=10_000)
def _by_chunks(placements: tuple[Placements, ...]) -> dict[frozenset[int], NDArray[np.intp]]:
    """The positions of the placements by the numbers of chunks that they have."""
    groups: dict[frozenset[int], list[int]] = {}
    for position, each in enumerate(placements):
        chunks = frozenset(own.chunks for own in each if isinstance(own, Shard))
        groups.setdefault(chunks - {1}, []).append(position)
    return {chunks: np.array(own) for chunks, own in groups.items()}


def _choices(tensor: MeshTensor, chunks: Sequence[int]) -> list[Placement]:
    shards = [Shard(dim, number) for number in chunks for dim in range(len(tensor.shape))]
    return [Replicate(), Partial(), *shards]


def _placements(tensor: MeshTensor, chunks: Sequence[int]) -> Iterator[Placements]:
    choices = _choices(tensor, chunks)
    for placements in product(choices, repeat=len(tensor.mesh)):
        if can_be_placed(tensor.shape, tensor.mesh, placements):
            yield placements


def _pairs(
    tensor: MeshTensor, number: dict[Placements, int], axis: int
) -> Iterator[tuple[Placements, Placements]]:
    """The placements between which one step on the axis leads."""
    groups: dict[tuple[Placements, Placements], list[Placements]] = {}
    for each in number:
        if is_free(tensor.mesh, each, axis, each[axis]):
            groups.setdefault((each[:axis], each[axis + 1 :]), []).append(each)
    for group in groups.values():
        yield from permutations(group, 2)
