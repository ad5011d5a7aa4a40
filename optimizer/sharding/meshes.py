"""The meshes that a worker can be, and what of them is worth planning for."""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.graph.cluster import Cluster
from pipedream.graph.placements.placement import Mesh

MOST_DEVICES = 64
"""Of a mesh: more are not tried unless they are asked for."""


def meshes(cluster: Cluster) -> Iterator[Mesh]:
    """The meshes of one or two axes whose devices divide the innermost level, the smallest first.

    Devices of one level are alike, so that an axis of 2 and one of 4 are the same as 4 and 2.
    """
    count = cluster.machines[0]
    for devices in range(2, min(count, MOST_DEVICES) + 1):
        if count % devices == 0:
            yield (devices,)
            for first in range(2, devices):
                if devices % first == 0 and first <= devices // first:
                    yield first, devices // first


def are_alike(cluster: Cluster) -> bool:
    """Whether all devices are of one type, so that any may share an operator."""
    devices = [cluster.device(rank) for rank in range(cluster.devices)]
    return all(each == devices[0] for each in devices)
