"""Ranks of one machine meet where nobody else can reach them."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from listening import is_loopback, listening
from processes import free_port, run_processes

from pipedream.comm.communicators import Communicators
from pipedream.comm.messages import PeerLost
from pipedream.comm.rank_info import RankInfo
from pipedream.comm.rendezvous import keep_torch_from_aborting, prepare_gpu
from pipedream.graph.errors import UserError
from pipedream.schedule.channel import Use, among


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_nothing_listens_beyond_the_loopback(address: str) -> None:
    """Torch's store and gloo listened on every address: losses could be forged from outside."""
    for addresses in run_processes(_meet, 2, address, free_port()):
        assert addresses
        assert all(map(is_loopback, addresses)), addresses


def _meet(rank: int, ranks: int, address: str, port: int) -> set[str]:
    import torch
    import torch.distributed as dist

    from pipedream.comm.rendezvous import connect_store, join

    rank_info = RankInfo(rank, ranks, rank, ranks, address, port)
    store = connect_store(rank_info, 60.0)
    join(rank_info, store, "gloo", torch.device("cpu"), 60.0)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [ranks] * 3
    found = listening([os.getpid()])
    dist.barrier()
    return found


def test_a_port_that_is_taken_is_named() -> None:
    (message, _) = run_processes(_refused, 2, free_port())
    assert "the 2 ranks did not all meet at 127.0.0.1" in message


def _refused(rank: int, ranks: int, port: int) -> str:
    import socket

    from pipedream.comm.rendezvous import RendezvousError, connect_store

    if rank:
        return ""
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RendezvousError) as refused:
        connect_store(RankInfo(rank, ranks, rank, ranks, "127.0.0.1", port), 5.0)
    return str(refused.value)


def test_a_rank_that_goes_while_a_group_is_connected_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mistake of the user ended rank 0 while rank 1 still connected its groups: beside the one
    line that names the mistake stood a traceback of gloo's.
    """

    def new_group(ranks: list[int], timeout: timedelta, pg_options: None) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with Connection closed by peer")

    monkeypatch.setattr(dist, "new_group", new_group)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        dist, "all_gather_object", lambda every, own: every.__setitem__(slice(2), [own, own])
    )
    try:
        with pytest.raises(PeerLost, match=r"the ranks \[0, 1\] could not be connected"):
            Communicators.connect([among((1, 0), Use.SUMS)], torch.device("cpu"), "gloo", 60.0)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_group_gives_up_when_the_run_says() -> None:
    """Groups had torch's half an hour, whatever the run's timeout."""
    assert run_processes(_timeouts, 2, free_port()) == [[7.0, 7.0]] * 2


def _timeouts(rank: int, ranks: int, port: int) -> list[float]:
    from pipedream.comm.rendezvous import connect_store, join

    rank_info, cpu = RankInfo(rank, ranks, rank, ranks, "127.0.0.1", port), torch.device("cpu")
    join(rank_info, connect_store(rank_info, 60.0), "gloo", cpu, 7.0)
    made = Communicators.connect([among(range(ranks), Use.SUMS)], cpu, "gloo", 7.0)
    groups = (dist.group.WORLD, made.sums(range(ranks)))
    dist.barrier()  # a process that ends resets those that still connect to it
    return [each._get_backend(cpu).options._timeout.total_seconds() for each in groups]


@pytest.mark.parametrize(
    ("there", "by_torchrun", "mode"),
    [(None, False, "0"), ("1", True, "0"), ("1", False, "1"), ("3", True, "3")],
)
def test_torch_ends_no_rank_unless_the_user_says_so(
    there: str | None, by_torchrun: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets 1 where the user has set nothing."""
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"})
    if there is not None:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = there
    if by_torchrun:
        os.environ["TORCHELASTIC_RUN_ID"] = "7"
    keep_torch_from_aborting()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == mode
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "1"


def test_a_gpu_has_queues_for_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the 8 that CUDA has by default, streams that share one wait for one another."""
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "NCCL_RUNTIME_CONNECT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    prepare_gpu()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "0"


def test_too_few_queues_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as in Megatron's recipes
    with pytest.raises(UserError, match="CUDA_DEVICE_MAX_CONNECTIONS"):
        prepare_gpu()
