"""`pd-profile --network`: one of the ranks that measure what is between them."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pipedream.capture.allocator import keep_freed_memory
from pipedream.comm.launcher import Place
from pipedream.comm.rendezvous import NotMet, choose_device, join, meet
from pipedream.comm.transport import PeerLost
from pipedream.graph.errors import UserError
from pipedream.profiler.device import device_name
from pipedream.profiler.network.levels import NetworkLevel, levels, levels_of
from pipedream.profiler.network.measure import MeasuredLevel, measure
from pipedream.profiler.network.options import Effort, NetworkOptions
from pipedream.profiler.network.report import Provenance, report
from pipedream.profiler.network.wire import Wire, peer_errors

_TIMEOUT = 300.0  # seconds
_UNTIL_THE_LAUNCHER_HAS_SEEN_WHO_DIED = 2.0
_UNTIL_RANK_0_HAS_SPOKEN = 5.0


def measure_network(asked: NetworkOptions, place: Place, step: Callable[[str], None]) -> None:
    """This rank's part; rank 0 writes and prints what was found.

    Raises UserError. When another rank is lost it says so in one line and ends the process.
    """
    device, backend = choose_device(asked.device, place)
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    try:
        store = join(place, meet(place, _TIMEOUT), backend, device, _TIMEOUT)
        hosts = _hosts(store, place)
        found = levels_of(hosts) if asked.machines is None else levels(asked.machines)
        measured = _measure(found, device, backend, asked.effort, step)
        if place.rank == 0:
            report(measured, _provenance(device, backend, hosts, asked.effort), asked.output)
        with peer_errors():
            dist.barrier()
            dist.destroy_process_group()
    except NotMet as error:
        _leave(place, str(error))
    except PeerLost as error:
        _leave(place, f"another rank does not answer any more: {error}")


def _measure(
    found: Sequence[NetworkLevel],
    device: torch.device,
    backend: str,
    effort: Effort,
    step: Callable[[str], None],
) -> list[MeasuredLevel]:
    pairs = [pair for level in found for pair in level.pairs]
    groups = [group for level in found for group in level.groups]
    wire = Wire(device, backend, pairs, groups)
    measured = [measure(level, wire, effort, step) for level in found]
    wire.transport.drain()
    return measured


def _hosts(store: Store, place: Place) -> list[str]:
    """The name of the host of each rank."""
    with peer_errors():
        store.set(f"host/{place.rank}", socket.gethostname())
        return [store.get(f"host/{rank}").decode() for rank in range(place.world_size)]


def _provenance(
    device: torch.device, backend: str, hosts: Sequence[str], effort: Effort
) -> Provenance:
    different = len(set(hosts))
    version = str(torch.__version__)
    return Provenance(len(hosts), different, backend, device_name(device), version, effort)


def _leave(place: Place, line: str) -> None:
    """Tells the user and ends the process: threads of it may wait for the lost rank.

    The others give rank 0 time to speak, and their launcher to stop them.
    """
    if place.rank > 0:
        time.sleep(_UNTIL_RANK_0_HAS_SPOKEN)
    print(f"pd-profile: rank {place.rank}: {line}", file=sys.stderr, flush=True)
    time.sleep(_UNTIL_THE_LAUNCHER_HAS_SEEN_WHO_DIED)
    os._exit(UserError.exit_code)
