"""Where processes meet: the device and backend of each, and the store that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipedream.comm.launcher import Place, restarts
from pipedream.graph.errors import UserError


class NotMet(RuntimeError):
    """Not all processes came to the rendezvous."""


def choose_device(name: str, place: Place) -> tuple[torch.device, str]:
    """Returns the device of this rank and the backend that serves it.

    NCCL if every rank of the machine has a GPU of its own; gloo on CPUs, and if several ranks share
    a GPU. Raises UserError if there is no such device.
    """
    if name == "cpu":
        return torch.device("cpu"), "gloo"
    count = torch.cuda.device_count()
    if count == 0:
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    torch.cuda.set_device(place.local_rank % count)
    device = torch.device("cuda", place.local_rank % count)
    return device, "nccl" if place.local_world_size <= count else "gloo"


def meet(place: Place, timeout: float) -> Store:
    """Returns the store that all ranks share. Raises NotMet if they do not all come."""
    with _meeting(place):
        address = f"tcp://{place.master_address}:{place.master_port}"
        limit = timedelta(seconds=timeout)
        met = rendezvous(address, place.rank, place.world_size, timeout=limit)
        store, _, _ = next(met)
        store.set_timeout(limit)
    # torchrun's store outlives a restart: what the workers before wrote must not be found.
    return PrefixStore(f"restart-{restarts()}", store)


def join(place: Place, met: Store, backend: str, device: torch.device, timeout: float) -> Store:
    """Joins the other ranks; returns the store of the run. Raises NotMet."""
    with _meeting(place):
        dist.init_process_group(
            backend,
            store=met,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if backend == "nccl" else None,
        )
    return PrefixStore("pipedream", met)


@contextmanager
def _meeting(place: Place) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        where = f"{place.master_address}:{place.master_port}"
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise NotMet(
            f"the {place.world_size} ranks did not all meet at {where}: {reason}"
        ) from error
