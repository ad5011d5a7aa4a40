"""Redistributions by real processes, exact to the last element.

All cases run in one set of four processes. Each of them draws the same cases and plans them itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import free_port, run_processes
from sharded import (
    Array,
    agree,
    hold,
    mesh_tensor,
    random_placements,
    random_shape,
    straight_steps,
)

from pipedream.graph.cluster import Link
from pipedream.graph.placements.placement import Mesh, Placements
from pipedream.sharding.redistribution import redistribute
from pipedream.sharding.steps import Collective, MeshTensor, Step

RANKS = 4
HELD_BY: tuple[tuple[Mesh, tuple[int, ...]], ...] = (
    ((2,), (0, 1)),
    ((2,), (3, 1)),
    ((4,), (0, 1, 2, 3)),
    ((2, 2), (0, 1, 2, 3)),
    ((2, 2), (2, 0, 3, 1)),
    ((1, 4), (0, 1, 2, 3)),
)
"""Meshes and the ranks of their devices."""
LINK = Link(bandwidth=1e9)


class Redistributed(NamedTuple):
    """A random redistribution: `case` is an index of HELD_BY."""

    case: int
    array: Array
    source: Placements
    target: Placements
    held: list[Array]

    @property
    def tensor(self) -> MeshTensor:
        return mesh_tensor(self.array.shape, 8, HELD_BY[self.case][0], LINK)

    @property
    def steps(self) -> tuple[Step, ...]:
        return redistribute(self.tensor, self.source, self.target)


def random_redistribution(rng: random.Random) -> Redistributed:
    case, shape = rng.randrange(len(HELD_BY)), random_shape(rng)
    mesh, _ = HELD_BY[case]
    source, target = (random_placements(rng, shape, mesh) for _ in range(2))
    array = _numbers(rng, shape)
    return Redistributed(case, array, source, target, hold(array, mesh, source, rng))


def _numbers(rng: random.Random, shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(rng.getrandbits(32)).integers(-99, 99, shape).astype(float)


def run_cases(rank: int, ranks: int, port: int, cases: int) -> list[tuple[Array, list[int]] | None]:
    """What this rank holds after each redistribution, with the bytes of its steps."""
    from mesh_groups import mesh_groups

    from pipedream.comm.rank_info import RankInfo
    from pipedream.comm.rendezvous import connect_store, join

    rank_info = RankInfo(rank, ranks, rank, ranks, "127.0.0.1", port)
    join(rank_info, connect_store(rank_info, 60.0), "gloo", torch.device("cpu"), 60.0)
    in_memory, by_messages = mesh_groups(HELD_BY), mesh_groups(HELD_BY)
    used = {axis.group for groups in by_messages if groups for axis in groups.axes.values()}
    assert all(group.memory is not None for group in used), "all are on this host"
    for group in used:  # several meshes have the same one
        group.memory = None
    rng = random.Random(1)
    done = [_redistribute((in_memory, by_messages)[number % 2], rng) for number in range(cases)]
    dist.barrier()
    dist.destroy_process_group()
    return done


def _redistribute(groups: list[Any], rng: random.Random) -> tuple[Array, list[int]] | None:
    case = random_redistribution(rng)
    own = groups[case.case]
    if own is None:
        return None
    held, sizes = torch.from_numpy(case.held[own.device].copy()), []
    for step in case.steps:
        before, copy = held, held.clone()
        with counted() as (sent, received):
            held = own.redistribute(held, case.array.shape, [step])
        assert torch.equal(before, copy), step
        sizes.append(max(sum(sent), sum(received)))
    return held.numpy(), sizes


@contextmanager
def counted() -> Iterator[tuple[list[int], list[int]]]:
    """Bytes that this rank sends to others and receives from them."""
    from pipedream.comm.shared_memory import SharedMemory

    sent: list[int] = []
    received: list[int] = []
    exchange, batch = SharedMemory.exchange, dist.batch_isend_irecv

    def count_exchange(memory: Any, outgoing: Any, shapes: Any) -> Any:
        parts = exchange(memory, outgoing, shapes)
        for peer, piece, part in zip(memory.peers, outgoing, parts, strict=True):
            if peer is not None:
                sent.append(piece.nbytes)
                received.append(part.nbytes)
        return parts

    def count_batch(operations: list[Any]) -> Any:
        for each in operations:
            (sent if each.op is dist.isend else received).append(each.tensor.nbytes)
        return batch(operations)

    SharedMemory.exchange, dist.batch_isend_irecv = count_exchange, count_batch  # type: ignore[method-assign]
    try:
        yield sent, received
    finally:
        SharedMemory.exchange, dist.batch_isend_irecv = exchange, batch  # type: ignore[method-assign]


def check_redistribution(case: Redistributed, by_rank: list[Any]) -> None:
    mesh, held_by = HELD_BY[case.case]
    by_device = [by_rank[rank] for rank in held_by]
    steps = case.steps
    assert agree([held for held, _ in by_device], case.array, mesh, case.target), case
    for index, step in enumerate(steps):
        if step.collective is not Collective.ALL_REDUCE:
            assert step.bytes == max(sizes[index] for _, sizes in by_device), (case, step)
    straight = straight_steps(case.tensor, case.source, case.target)
    assert sum(step.bytes for step in steps) <= sum(step.bytes for step in straight), case


@pytest.mark.slow
@pytest.mark.parametrize("cases", [40, pytest.param(1000, marks=pytest.mark.thorough)])
def test_random_cases_by_four_processes(cases: int) -> None:
    """Compared with the whole arrays. Every other one goes by messages, the rest through memory."""
    ranks = run_processes(run_cases, RANKS, free_port(), cases)
    rng = random.Random(1)
    for index in range(cases):
        check_redistribution(random_redistribution(rng), [each[index] for each in ranks])
