"""Redistributions and transfers between stages by real processes, exact to the last element.

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
    MESHES,
    Array,
    agree,
    hold,
    local_part,
    random_placements,
    random_shape,
    straight_steps,
)

from pipedream.graph.cluster import Link
from pipedream.graph.sharding.placement import Mesh, Placements, device_count
from pipedream.graph.sharding.redistribution import redistribute
from pipedream.graph.sharding.steps import Collective, MeshTensor, Step
from pipedream.graph.sharding.tiles import match_tiles

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
        return MeshTensor.of(self.array.shape, 8, HELD_BY[self.case][0], LINK)

    @property
    def steps(self) -> tuple[Step, ...]:
        return redistribute(self.tensor, self.source, self.target)


class Sent(NamedTuple):
    """A random transfer between stages: mesh, placements and ranks of each."""

    array: Array
    source: tuple[Mesh, Placements, tuple[int, ...]]
    target: tuple[Mesh, Placements, tuple[int, ...]]


def random_redistribution(rng: random.Random) -> Redistributed:
    case, shape = rng.randrange(len(HELD_BY)), random_shape(rng)
    mesh, _ = HELD_BY[case]
    source, target = (random_placements(rng, shape, mesh) for _ in range(2))
    array = _numbers(rng, shape)
    return Redistributed(case, array, source, target, hold(array, mesh, source, rng))


def random_transfer(rng: random.Random) -> Sent:
    """Between ranks of which some, all or none are on both sides."""
    shape = random_shape(rng)
    sides = []
    for mesh in (rng.choice(((1,), (3,), *MESHES)), rng.choice(((1,), (3,), *MESHES))):
        ranks = tuple(rng.sample(range(RANKS), device_count(mesh)))
        sides.append((mesh, random_placements(rng, shape, mesh, partial=False), ranks))
    return Sent(_numbers(rng, shape), sides[0], sides[1])


def _numbers(rng: random.Random, shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(rng.getrandbits(32)).integers(-99, 99, shape).astype(float)


def run_cases(
    rank: int, ranks: int, port: int, redistributions: int, transfers: int
) -> tuple[list[Any], list[Any]]:
    """What this rank holds after each redistribution, with the bytes of its steps, and after each
    transfer, with the bytes it has sent and received.
    """
    from pipedream.comm.rank_info import RankInfo
    from pipedream.comm.redistribute import MeshGroups
    from pipedream.comm.rendezvous import connect_store, join

    rank_info = RankInfo(rank, ranks, rank, ranks, "127.0.0.1", port)
    join(rank_info, connect_store(rank_info, 60.0), "gloo", torch.device("cpu"), 60.0)
    groups = [MeshGroups(mesh, held_by) for mesh, held_by in HELD_BY]
    rng = random.Random(1)
    redistributed = [_redistribute(groups, rng) for _ in range(redistributions)]
    sent = [_transfer(rank, rng) for _ in range(transfers)]
    dist.barrier()
    dist.destroy_process_group()
    return redistributed, sent


def _redistribute(groups: list[Any], rng: random.Random) -> tuple[Array, list[int]] | None:
    case = random_redistribution(rng)
    own = groups[case.case]
    if own.device is None:
        return None
    held, sizes = torch.from_numpy(case.held[own.device].copy()), []
    for step in case.steps:
        before, copy = held, held.clone()
        with counted() as (sent, received):
            held = own.redistribute(held, case.array.shape, [step])
        assert torch.equal(before, copy), step
        sizes.append(max(sum(sent), sum(received)))
    return held.numpy(), sizes


def _transfer(rank: int, rng: random.Random) -> tuple[Array | None, int, int]:
    from pipedream.comm.redistribute import PlacedOnRanks, WholeTensor, send_tiles

    array, source, target = random_transfer(rng)
    held = None
    if rank in source[2]:
        held = torch.from_numpy(local_part(array, *source[:2], source[2].index(rank)).copy())
    transfers = match_tiles(array.shape, source[:2], target[:2])
    with counted() as (sent, received):
        result = send_tiles(
            held,
            WholeTensor(array.shape, torch.float64, torch.device("cpu")),
            transfers,
            PlacedOnRanks(*source),
            PlacedOnRanks(*target),
        )
    return None if result is None else result.numpy(), sum(sent), sum(received)


@contextmanager
def counted() -> Iterator[tuple[list[int], list[int]]]:
    """Bytes of messages that this rank sends to others and receives from them, without sums."""
    sent: list[int] = []
    received: list[int] = []
    exchange, batch = dist.all_to_all_single, dist.batch_isend_irecv

    def count_exchange(
        output: torch.Tensor, input: torch.Tensor, outputs: Any, inputs: Any, group: Any
    ) -> None:
        here = dist.get_rank(group)
        sent.append((sum(inputs) - inputs[here]) * input.itemsize)
        received.append((sum(outputs) - outputs[here]) * output.itemsize)
        exchange(output, input, outputs, inputs, group=group)

    def count_batch(operations: list[Any]) -> Any:
        for each in operations:
            (sent if each.op is dist.isend else received).append(each.tensor.nbytes)
        return batch(operations)

    dist.all_to_all_single, dist.batch_isend_irecv = count_exchange, count_batch
    try:
        yield sent, received
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = exchange, batch


def check(redistributions: int, transfers: int) -> None:
    """Runs so many random cases of each kind, and compares with the whole arrays."""
    ranks = run_processes(run_cases, RANKS, free_port(), redistributions, transfers)
    rng = random.Random(1)
    for index in range(redistributions):
        check_redistribution(random_redistribution(rng), [each[0][index] for each in ranks])
    for index in range(transfers):
        check_transfer(random_transfer(rng), [each[1][index] for each in ranks])


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


def check_transfer(case: Sent, by_rank: list[Any]) -> None:
    (mesh, placements, ranks) = case.target
    whole = 0
    for device, rank in enumerate(ranks):
        held, _, received = by_rank[rank]
        expected = local_part(case.array, mesh, placements, device)
        assert held.shape == expected.shape, case
        assert (held == expected).all(), case
        assert received <= expected.nbytes, case
        whole += expected.nbytes
    assert sum(sent for _, sent, _ in by_rank) <= whole, case
    assert all(by_rank[rank][0] is None for rank in set(range(RANKS)) - set(ranks))


@pytest.mark.parametrize(
    ("redistributions", "transfers"),
    [(40, 20), pytest.param(1000, 500, marks=pytest.mark.slow)],
)
def test_random_cases_by_four_processes(redistributions: int, transfers: int) -> None:
    check(redistributions, transfers)
