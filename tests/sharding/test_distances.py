"""All redistributions of a type of tensor at once equal those that are found one by one."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream.graph.cluster import Link
from pipedream.graph.placements.placement import Partial, Placement, Replicate, Shard
from pipedream.sharding.distances import Distances
from pipedream.sharding.redistribution import redistribute
from pipedream.sharding.steps import MeshTensor, can_be_placed

FAST, SLOW = Link(latency=1e-6, bandwidth=1e9), Link(latency=3e-5, bandwidth=1e8)
MEASURED = Link(points=((1.0, 1e-5), (1e3, 2e-5), (1e5, 9e-4)))


@settings(max_examples=15, deadline=None)
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 6, 8, 12, 15]), min_size=1, max_size=3),
    mesh=st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3), (4, 2), (2, 1, 2)]),
    chunks=st.sampled_from([(1,), (1, 3), (1, 2)]),
    links=st.lists(st.sampled_from([FAST, SLOW, MEASURED]), min_size=3, max_size=3),
    third=st.integers(0, 2),
)
def test_each_pair_takes_as_long_as_its_steps(shape, mesh, chunks, links, third):
    """Those to a third of the placements: to find each takes up to a tenth of a second."""
    tensor = MeshTensor(tuple(shape), 4, mesh, tuple(links[: len(mesh)]))
    choices: list[Placement] = [Replicate(), Partial()]
    choices += [Shard(dim, number) for dim in range(len(shape)) for number in chunks]
    placements = [
        each
        for each in product(choices, repeat=len(mesh))
        if can_be_placed(tensor.shape, mesh, each)
    ]
    some = tuple(placements[:: 1 + len(placements) // 12])
    targets = some[third::3]
    seconds = Distances(tensor).seconds(some, targets)
    for (row, source), (column, target) in product(enumerate(some), enumerate(targets)):
        steps = redistribute(tensor, source, target)
        assert seconds[row, column] == pytest.approx(sum(step.seconds for step in steps), 1e-12)
