"""`pd-profile --network`: what each of the measuring ranks does."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pipedream.capture.compute_settings import keep_freed_memory
from pipedream.capture.sources.load import Loaded
from pipedream.comm.device.names import device_name
from pipedream.comm.messages import PeerLost
from pipedream.comm.rank_info import RankInfo
from pipedream.comm.rendezvous import RendezvousError, choose_device, connect_store, join
from pipedream.graph.errors import UserError
from pipedream.profiler.network.interference import Work
from pipedream.profiler.network.levels import levels, levels_of
from pipedream.profiler.network.measure import measure
from pipedream.profiler.network.options import NetworkOptions
from pipedream.profiler.network.report import report
from pipedream.profiler.network.wire import Wire, peer_errors

_TIMEOUT = 300.0  # seconds
_SECONDS_FOR_LAUNCHER = 2.0  # to notice which rank failed
_SECONDS_FOR_RANK_0 = 5.0  # to print its error


def measure_network(
    options: NetworkOptions,
    rank_info: RankInfo,
    step: Callable[[str], None],
    loaded: Loaded | None = None,
) -> None:
    """Measures as one of the ranks; rank 0 writes and prints the results.

    With `loaded`, sums are measured beside passes of that model. Raises UserError. If
    another rank is lost, prints one line and ends the process.
    """
    device, backend = choose_device(options.device, rank_info)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    work = None if loaded is None else Work.of_model(loaded, device)
    try:
        store = join(rank_info, connect_store(rank_info, _TIMEOUT), backend, device, _TIMEOUT)
        hosts = _hosts(store, rank_info)
        measured_levels = levels_of(hosts) if options.machines is None else levels(options.machines)
        pairs = [pair for level in measured_levels for pair in level.pairs]
        groups = [group for level in measured_levels for group in level.groups]
        wire = Wire(device, backend, pairs, groups, _TIMEOUT)
        measured = [measure(level, wire, options.effort, work, step) for level in measured_levels]
        wire.transport.drain()
        if rank_info.rank == 0:
            report(measured, _provenance(device, backend, hosts, options), options.output)
        with peer_errors():
            dist.barrier()
            dist.destroy_process_group()
    except RendezvousError as error:
        _leave(rank_info, str(error))
    except PeerLost as error:
        _leave(rank_info, f"another rank does not answer any more: {error}")


def _hosts(store: Store, rank_info: RankInfo) -> list[str]:
    """Returns the host name of each rank."""
    with peer_errors():
        store.set(f"host/{rank_info.rank}", socket.gethostname())
        return [store.get(f"host/{rank}").decode() for rank in range(rank_info.world_size)]


def _provenance(
    device: torch.device, backend: str, hosts: Sequence[str], options: NetworkOptions
) -> str:
    different = len(set(hosts))
    on = "1 host" if different == 1 else f"{different} hosts"
    effort = options.effort
    beside = "" if options.model is None else f", sums beside passes of {options.model}"
    return (
        f"{len(hosts)} ranks on {on}, {backend}, {device_name(device)}, torch {torch.__version__}: "
        f"median of {effort.repeats} after {effort.warmup} of warm-up{beside}"
    )


def _leave(rank_info: RankInfo, line: str) -> None:
    """Prints the error and ends the process, whose threads may be waiting for the lost rank.

    Ranks other than 0 wait first, so that rank 0 prints the error and the launcher stops the rest.
    """
    if rank_info.rank > 0:
        time.sleep(_SECONDS_FOR_RANK_0)
    print(f"pd-profile: rank {rank_info.rank}: {line}", file=sys.stderr, flush=True)
    time.sleep(_SECONDS_FOR_LAUNCHER)
    os._exit(UserError.exit_code)
