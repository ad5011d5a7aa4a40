"""What a launcher such as torchrun does for each rank, on the emulated network."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from network import PORT, EmulatedNetwork

from pipedream.comm.rank_info import RankInfo

STORE_PORT = 29_500
"""Where the ranks meet, on the first device. Every run has a network of its own."""


def launch(network: EmulatedNetwork, rank: int, devices: Sequence[int]) -> None:
    """Makes this process `rank` of those on `devices`, with one thread."""
    network.enter(devices[rank])
    first = network.address(devices[0])
    place = RankInfo(rank, len(devices), 0, 1, first, STORE_PORT)
    os.environ.update(place.variables(), GLOO_SOCKET_IFNAME=PORT)
    torch.set_num_threads(1)
