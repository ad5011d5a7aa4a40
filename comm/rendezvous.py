"""Rendezvous of the ranks: the device and backend of each, and the store that they share."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from pipedream.comm.rank_info import LOCALHOST, RankInfo, restarts
from pipedream.graph.errors import UserError

_ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_QUEUES, _MOST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32


class RendezvousError(RuntimeError):
    """Reports that not all ranks joined in time."""


def choose_device(name: str, rank_info: RankInfo) -> tuple[torch.device, str]:
    """Returns the device of this rank, cpu or cuda, and its backend.

    NCCL if every rank of the machine has its own GPU; gloo on CPUs and if ranks share a GPU. Raises
    UserError if there is no such device, or it cannot be used so.
    """
    if name == "cpu":
        return torch.device("cpu"), "gloo"
    count = torch.cuda.device_count()
    if count == 0:
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    backend = "nccl" if rank_info.local_world_size <= count else "gloo"
    if backend == "nccl" and rank_info.world_size > 1:
        prepare_gpu()
    device = torch.device("cuda", rank_info.local_rank % count)
    torch.cuda.set_device(device)
    return device, backend


def prepare_gpu() -> None:
    """Sets what CUDA and NCCL read when they start. Raises UserError if it was set, or CUDA has
    started, so that operations which wait for other ranks would stop what is behind them.

    A stream of the GPU has one of so many hardware queues, and what waits at the head of one stops
    all streams that share it. Kernels that are loaded when they are first used wait for the device,
    with all receives that are posted on it.
    """
    queues = os.environ.get(_QUEUES)
    if queues is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UserError(
            f"CUDA has started before the ranks met: set {_QUEUES}={_MOST_QUEUES} in the"
            " environment, or make the Pipeline before anything is on a GPU"
        )
    if queues is not None and (not queues.isdigit() or int(queues) < _MOST_QUEUES):
        raise UserError(
            f"{_QUEUES}={queues}: with fewer than {_MOST_QUEUES} queues a message that waits for"
            f" another rank stops the passes behind it; unset it, or set {_MOST_QUEUES}"
        )
    os.environ[_QUEUES] = str(_MOST_QUEUES) if queues is None else queues
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")


def keep_torch_from_aborting() -> None:
    """Has torch's own watch over NCCL say what it finds, and not end the process, with a trace in
    C++ and before the rank at fault is named. For a run that is watched otherwise.
    """
    # torchrun sets 1, to end the process, where the user has set nothing.
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(_ON_ERROR) == "1"
    if by_torchrun or _ON_ERROR not in os.environ:
        # Not 2, which ends operations alone: those who wait for them would go on with any numbers.
        os.environ[_ON_ERROR] = "0"
    # A thread of its own ends the process if torch's watch stands still, or another rank's has
    # found something, whatever is set above.
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    # The engine sees an error of CUDA, too, and says at which action.
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")


def connect_store(rank_info: RankInfo, timeout: float) -> Store:
    """Connects to the store that all ranks share. Raises RendezvousError if some rank is late.

    A store at an address of this machine alone is open to this machine alone.
    """
    with _meeting(rank_info):
        limit = timedelta(seconds=timeout)
        served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if rank_info.rank == 0 and rank_info.stays_here and not served_by_torchrun:
            store: Store = _serve_here(rank_info, limit)
        else:
            address = f"tcp://{rank_info.master_address}:{rank_info.master_port}"
            met = rendezvous(address, rank_info.rank, rank_info.world_size, timeout=limit)
            store, _, _ = next(met)
        store.set_timeout(limit)
    # The store of torchrun outlives a restart; the prefix hides entries of earlier workers.
    return PrefixStore(f"restart-{restarts()}", store)


def _serve_here(rank_info: RankInfo, limit: timedelta) -> Store:
    """Torch's own server listens on every address of the machine, and asks nobody for a secret."""
    listening = socket.create_server((LOCALHOST, rank_info.master_port))
    return TCPStore(
        LOCALHOST,
        rank_info.master_port,
        rank_info.world_size,
        is_master=True,
        timeout=limit,
        master_listen_fd=listening.detach(),
    )


def _talk_here() -> None:
    """Has gloo and NCCL listen on the loopback interface; the user's own choice goes first."""
    here = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if here is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", here)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", here)


def join(
    rank_info: RankInfo, met: Store, backend: str, device: torch.device, timeout: float
) -> Store:
    """Joins the process group; returns the store of the run. Raises RendezvousError."""
    if rank_info.local_world_size == rank_info.world_size:
        _talk_here()
    with _meeting(rank_info):
        dist.init_process_group(
            backend,
            store=met,
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if backend == "nccl" else None,
        )
    return PrefixStore("pipedream", met)


@contextmanager
def _meeting(rank_info: RankInfo) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{rank_info.master_address}:{rank_info.master_port}"
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise RendezvousError(
            f"the {rank_info.world_size} ranks did not all meet at {where}: {reason}"
        ) from error
