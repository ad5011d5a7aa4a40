"""`--cluster auto`: the workers of this machine, and the network between them as measured here."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from pipedream.graph.cluster import Cluster, read_cluster
from pipedream.graph.errors import UserError
from pipedream.graph.profile import Machine

_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


@cache
def cluster_here(workers: int, device: str, folder: Path | None = None) -> Cluster:
    """Measures between so many processes with a `device` (cpu or cuda) each; they write the results
    to `folder`, if there is one for them. Raises UserError.
    """
    if workers < 2:
        raise UserError(
            f"--cluster auto: there is {workers} worker here, and nothing to measure: give"
            " --workers N, or name a cluster file"
        )
    print(
        f"Measuring the network between {workers} workers of this machine",
        file=sys.stderr,
        flush=True,
    )
    with TemporaryDirectory() if folder is None else nullcontext(folder) as results:
        return _measure(workers, device, Path(results))


def _measure(workers: int, device: str, folder: Path) -> Cluster:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["--nproc-per-node", str(workers), "-m", "pipedream.profiler.cli", "--network"]
    done = subprocess.run(
        [*torchrun, *program, "--device", device, "-o", str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    if done.returncode:
        raise UserError(f"--cluster auto: pd-profile --network failed: {_why(done.stderr)}")
    return read_cluster(folder / "cluster.yaml")


def workers_here(machine: Machine | None) -> int:
    """How many workers this machine has: GPUs if the profile is of one; on a CPU as many as it was
    profiled with, or as many as its threads leave cores for.
    """
    if machine is not None and machine.device != "cpu":
        counted = subprocess.run(
            [sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, check=True
        )
        return int(counted.stdout)
    if machine is not None and machine.workers > 1:
        return machine.workers
    threads = 1 if machine is None else machine.threads
    return len(os.sched_getaffinity(0)) // threads


def _why(output: str) -> str:
    """Returns what the first rank to fail said; torchrun says more about it afterwards."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("Error", "pd-profile:"))]
    return (errors or lines or ["it said nothing"])[0]
