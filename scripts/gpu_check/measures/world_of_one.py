"""NCCL with one rank: communicators as runs make them, with their options, and sums on them."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from gpu_check.check import Measured, Setting
from pipedream.comm.communicators import Communicators
from pipedream.comm.rank_info import RankInfo
from pipedream.comm.rendezvous import choose_device, connect_store, join, prepare_gpu
from pipedream.comm.transport import Transport
from pipedream.schedule.channel import Communicator, Use, among

_SECONDS = 30.0
_WANTED = (among([0], Use.SUMS), Communicator(Use.ACTIVATION_MESSAGES, (0,), (0,)))


def difference(setting: Setting) -> Measured:
    """Returns how far the sums over one rank are from what was given."""
    if setting.device == "cuda":
        prepare_gpu()
    rank_info = RankInfo(0, 1, 0, 1, "127.0.0.1", free_port())
    device, backend = choose_device(setting.device, rank_info)
    join(rank_info, connect_store(rank_info, _SECONDS), backend, device, _SECONDS)
    communicators = Communicators.connect(_WANTED, device, backend, _SECONDS)
    transport = Transport(device, backend, communicators.links)
    worst = max(_off(transport, communicators.groups[each]) for each in _WANTED)
    transport.barrier()
    dist.destroy_process_group()
    return Measured(worst, f"{backend}, {len(_WANTED)} communicators")


def _off(transport: Transport, group: dist.ProcessGroup) -> float:
    """Of sums of several types, in one message for each."""
    given = [
        torch.arange(1_000, device=transport.device).to(dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ]
    sums = [each.clone() for each in given]
    transport.add_up(sums, group)
    transport.average(sums, group)
    return max((one - other).abs().max().item() for one, other in zip(sums, given, strict=True))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
