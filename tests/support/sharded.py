"""Tensors in parts: which elements a device holds, found by cutting arrays, and random cases."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipedream.graph.cluster import Link
from pipedream.graph.placements.placement import (
    Mesh,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    axis_groups,
)
from pipedream.graph.placements.regions import check_placements
from pipedream.sharding.steps import MeshTensor, Step, make_step
from pipedream.sharding.tiles import TileTransfers

Array = NDArray[np.float64]


def local_part(array: Array, mesh: Mesh, placements: Placements, device: int) -> Array:
    """What the device holds of the array; of a partial one, all elements it has terms of."""
    for size, index, placement in zip(
        mesh, np.unravel_index(device, mesh), placements, strict=True
    ):
        if isinstance(placement, Shard):
            chunks = np.split(array, placement.chunks, placement.dim)
            parts = [np.array_split(chunk, size, placement.dim)[index] for chunk in chunks]
            array = np.concatenate(parts, placement.dim)
    return array


def element_ids(shape: tuple[int, ...]) -> Array:
    """Each element is its own number."""
    return np.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape)


def held_ids(
    shape: tuple[int, ...], mesh: Mesh, placements: Placements, device: int
) -> list[float]:
    """The numbers of the elements that the device holds, in the order of its local tensor."""
    ids: list[float] = local_part(element_ids(shape), mesh, placements, device).ravel().tolist()
    return ids


def hold(array: Array, mesh: Mesh, placements: Placements, rng: random.Random) -> list[Array]:
    """The array as the devices hold it, terms of partial sums at random."""
    terms = _terms(array, mesh, placements, rng)
    return [
        local_part(terms[_partial_position(mesh, placements, device)], mesh, placements, device)
        for device in range(np.prod(mesh))
    ]


def sums(locals_: Sequence[Array], mesh: Mesh, placements: Placements) -> list[Array]:
    """For each device the sum over the partial axes."""
    stacked = np.empty(len(locals_), dtype=object)
    stacked[:] = list(locals_)
    by_position = stacked.reshape(mesh)
    for axis, placement in enumerate(placements):
        if placement == Partial():
            total = by_position.sum(axis=axis, keepdims=True)
            by_position = np.repeat(total, mesh[axis], axis=axis)
    return list(by_position.reshape(-1))


def agree(locals_: Sequence[Array], array: Array, mesh: Mesh, placements: Placements) -> bool:
    """Whether the devices hold the array."""
    expected = [local_part(array, mesh, placements, d) for d in range(len(locals_))]
    found = sums(locals_, mesh, placements)
    return all(
        one.shape == other.shape and (one == other).all()
        for one, other in zip(found, expected, strict=True)
    )


def _partial_position(mesh: Mesh, placements: Placements, device: int) -> tuple[int, ...]:
    position = np.unravel_index(device, mesh)
    return tuple(
        int(index)
        for index, placement in zip(position, placements, strict=True)
        if placement == Partial()
    )


def _terms(
    array: Array, mesh: Mesh, placements: Placements, rng: random.Random
) -> dict[tuple[int, ...], Array]:
    sizes = [size for size, each in zip(mesh, placements, strict=True) if each == Partial()]
    draws = np.random.default_rng(rng.getrandbits(32))
    terms = {
        position: draws.integers(-99, 99, array.shape).astype(float)
        for position in product(*map(range, sizes))
    }
    last = tuple(size - 1 for size in sizes)
    terms[last] = array - sum(term for position, term in terms.items() if position != last)
    return terms


def run_steps(
    shape: tuple[int, ...], mesh: Mesh, steps: Sequence[Step], held: Sequence[Array]
) -> list[Array]:
    """What the devices hold after the steps, element by element: each takes what it is to hold from
    its group, where it is held alike or is to be added up.
    """
    held = list(held)
    for step in steps:
        before = dict(enumerate(held))
        for group in axis_groups(mesh, step.axis):
            own = [
                dict(zip(held_ids(shape, mesh, step.source, d), before[d].flat, strict=True))
                for d in group
            ]
            for index, device in enumerate(group):
                sources = own
                if step.target[step.axis] == Partial():
                    replicated = step.source[step.axis] == Replicate()
                    sources = [] if replicated and index else [own[index]]
                to_add = step.source[step.axis] == Partial()
                part = local_part(element_ids(shape), mesh, step.target, device)
                values = [_value(each, sources, to_add, step) for each in part.flat]
                held[device] = np.array(values, dtype=float).reshape(part.shape)
    return held


def _value(
    element: float, sources: Sequence[dict[float, float]], to_add: bool, step: Step
) -> float:
    found = [source[element] for source in sources if element in source]
    if step.target[step.axis] == Partial():
        return sum(found)
    assert found, f"{step}: nobody in the group has element {element}"
    assert to_add or len(set(found)) == 1, step
    return sum(found) if to_add else found[0]


def mesh_tensor(shape: tuple[int, ...], element_bytes: int, mesh: Mesh, link: Link) -> MeshTensor:
    """The tensor, with the same link on all axes."""
    return MeshTensor(shape, element_bytes, mesh, (link,) * len(mesh))


def received(transfers: TileTransfers, element_bytes: int) -> Counter[int]:
    """The bytes that target devices receive from source devices."""
    total: Counter[int] = Counter()
    for each in transfers.sends:
        total[each.target] += each.region.size * element_bytes
    return total


def straight_steps(tensor: MeshTensor, source: Placements, target: Placements) -> list[Step]:
    """Replicates everything, from the last axis to the first, and cuts out what is wanted."""
    steps = []
    axes = range(len(source))
    changes: list[tuple[int, Placement]] = [(axis, Replicate()) for axis in reversed(axes)]
    for axis, placement in [*changes, *((axis, target[axis]) for axis in axes)]:
        step = make_step(tensor, source, axis, placement)
        if step is not None:
            steps.append(step)
            source = step.target
        assert source[axis] == placement
    return steps


SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13)


def random_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice(SIZES) for _ in range(rng.randint(1, 3)))


def random_placements(
    rng: random.Random, shape: tuple[int, ...], mesh: Mesh, partial: bool = True
) -> Placements:
    """Placements that fit the shape."""
    while True:
        placements = tuple(_random_placement(rng, len(shape), partial) for _ in mesh)
        try:
            check_placements(shape, mesh, placements)
        except ValueError:
            continue
        return placements


def _random_placement(rng: random.Random, dims: int, partial: bool) -> Placement:
    kind = rng.choice("RSSSC" + "P" * partial)
    if kind in "SC":
        return Shard(rng.randrange(dims), rng.choice((2, 3)) if kind == "C" else 1)
    return Partial() if kind == "P" else Replicate()


MESHES: tuple[Mesh, ...] = ((2,), (4,), (2, 2), (1, 4))


@st.composite
def placed(
    draw: st.DrawFn,
    meshes: Sequence[Mesh] = (*MESHES, (3,), (2, 3), (3, 2), (2, 1, 2)),
    partial: bool = True,
    ways: int = 1,
) -> tuple[tuple[int, ...], Mesh, tuple[Placements, ...]]:
    """A shape, a mesh, and so many placements that fit them."""
    mesh = draw(st.sampled_from(meshes))
    rng = draw(st.randoms(use_true_random=False))
    shape = random_shape(rng)
    return shape, mesh, tuple(random_placements(rng, shape, mesh, partial) for _ in range(ways))
