"""Tensors exchanged among ranks, through the host's memory and by messages: the same bits."""

from __future__ import annotations

import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from processes import free_port, run_processes
from torch import Tensor

from pipedream.comm.exchange import ExchangeGroup
from pipedream.comm.messages import PeerLost

RANKS, ROUNDS = 3, 60


def content(source: int, target: int, number: int) -> Tensor:
    """What one rank sends another in an exchange: of any size, often none, at times a large one."""
    rng = random.Random(f"{source}, {target}, {number}")
    shape = rng.choice([(), (0,), (3,), (5, 2), (rng.randrange(1, 40), 1_000)])
    dtype = random.Random(number).choice([torch.float32, torch.float64, torch.int64])
    values = torch.arange(torch.Size(shape).numel()) + 1_000 * number + 100 * source + target
    return values.view(shape).to(dtype)


def joined(rank: int, ranks: int, port: int) -> ExchangeGroup:
    address = f"tcp://127.0.0.1:{port}"
    timeout = timedelta(seconds=30)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=ranks, timeout=timeout
    )
    group = dist.new_group(timeout=timeout)
    assert group is not None
    return ExchangeGroup(group)


def exchanges(rank: int, ranks: int, port: int) -> int:
    """How many tensors came as they were sent, in exchanges right after one another."""
    group = joined(rank, ranks, port)
    assert group.memory is not None, "all are on this host"
    right = 0
    for number in range(ROUNDS):
        outgoing = [content(rank, other, number) for other in range(ranks)]
        wanted = [content(other, rank, number) for other in range(ranks)]
        if number % 7 == rank:
            time.sleep(0.005)  # one is late
        parts = group.exchange(outgoing, [tuple(each.shape) for each in wanted])
        right += sum(
            torch.equal(part, each) and part.dtype == each.dtype
            for part, each in zip(parts, wanted, strict=True)
        )
    return right


@pytest.mark.slow
def test_what_is_sent_comes() -> None:
    right = run_processes(exchanges, RANKS, free_port())
    assert right == [RANKS * ROUNDS] * RANKS


def sums(rank: int, ranks: int, port: int) -> list[list[float]]:
    """Of the same tensors, through memory and by messages."""
    group = joined(rank, ranks, port)
    local = torch.rand(5, 7, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    through_memory = group.add_up(local)
    group.memory = None
    return [through_memory.flatten().tolist(), group.add_up(local).flatten().tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_have_the_same_bits_either_way(ranks: int) -> None:
    results = [each for of_rank in run_processes(sums, ranks, free_port()) for each in of_rank]
    assert all(each == results[0] for each in results)
    terms = (
        torch.rand(5, 7, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        for rank in range(ranks)
    )
    torch.testing.assert_close(torch.tensor(results[0]).double(), sum(terms).flatten())  # type: ignore[union-attr]


def loses_one(rank: int, ranks: int, port: int) -> str:
    """What a rank says when the system has closed what the other had, as it does when that dies."""
    group = joined(rank, ranks, port)
    tensors = [torch.ones(10)] * ranks
    group.exchange(tensors, [(10,)] * ranks)
    if rank == 1:
        time.sleep(0.2)  # the other waits
        assert group.memory is not None
        for peer in group.memory.peers:
            if peer is not None:
                peer.stream.close()
        return ""
    try:
        group.exchange(tensors, [(10,)] * ranks)
    except PeerLost as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_a_rank_that_is_gone_is_a_lost_peer() -> None:
    told, _ = run_processes(loses_one, 2, free_port())
    assert told == "another rank of the mesh does not answer"
