"""The emulated network as pd-profile --network measures it: what a user would plan with."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from forked import run_ranks
from launched import launch
from network import EmulatedNetwork

import pipedream.profiler.network.command  # noqa: F401 - so that the processes need not import it
from pipedream.graph.cluster import Cluster, Link, read_cluster
from pipedream.graph.errors import UserError
from pipedream.profiler.cli import main as pd_profile
from pipedream.profiler.network.interference import Work

LARGEST = "256kB"
"""Bytes of a message, as much as some parts of a sum have: a tenth of a second at 2.5 MB/s."""
SECONDS_LIMIT = 600.0
SLEEP = 2e-3  # seconds


def measure_cluster(cluster: Cluster, folder: Path) -> Cluster:
    """Measures the emulated `cluster`; what pd-profile writes and prints is in `folder`.

    That messages cost the cores of this machine is left out: layers that sleep do not miss them.
    Work beside them sleeps too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cluster.yaml"
    if not path.exists():
        with closing(EmulatedNetwork(cluster)) as network:
            body = partial(_be_rank, network, cluster, folder)
            ended = run_ranks(cluster.devices, body, folder, SECONDS_LIMIT)
        if any(ended.codes):
            raise UserError(f"the network was not measured: see rank*.log in {folder}")
    found = read_cluster(path)
    links = {name: getattr(found, name) for name in ("send", "all_reduce", "all_gather")}
    return found.model_copy(
        update={name: tuple(map(_never_busy, measured)) for name, measured in links.items()}
    )


def _be_rank(network: EmulatedNetwork, cluster: Cluster, folder: Path, rank: int) -> int:
    launch(network, rank, range(cluster.devices))
    machines = ",".join(map(str, cluster.machines))
    effort = ["--largest", LARGEST, "--warmup", "1", "--repeats", "3"]
    Work.product = staticmethod(lambda device: Work(_asleep, places=1))  # type: ignore[assignment]
    words = ["--network", "-o", str(folder), "--machines", machines, *effort]
    return int(pd_profile(words, standalone_mode=False) or 0)


def _asleep(reached: Callable[[], None]) -> None:
    reached()
    time.sleep(SLEEP)


def _never_busy(link: Link | None) -> Link | None:
    return None if link is None else link.model_copy(update={"busy": 0.0})
