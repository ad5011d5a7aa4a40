"""Reads the rank of this process from the environment of torchrun, mpirun or srun."""

from __future__ import annotations

import os
import random
import socket
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from pipedream.graph.errors import UserError

RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun
LOCALHOST = "127.0.0.1"
PORTS = range(20_000, 30_000)
"""Ports for the rendezvous, below those that operating systems assign on their own."""

_UNTIL_RANK_0_HAS_SPOKEN = 5.0  # seconds


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process as its launcher gave it, and the address of the rendezvous."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int

    @property
    def stays_here(self) -> bool:
        """Tells whether the address of the rendezvous reaches this machine alone."""
        return self.master_address == "localhost" or self.master_address.startswith("127.")

    def variables(self) -> dict[str, str]:
        """Returns the same as variables of torchrun, which `init_method="env://"` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


@dataclass(frozen=True)
class _Launcher:
    """The environment variables of a launcher; those in `job` identify the run."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    job: tuple[str, ...] = ()


_LAUNCHERS = (
    _Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun
    _Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",),
    ),
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    _Launcher(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",  # set by srun only, not in the shell of a batch job
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


def environment(variables: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Returns the rank of this process by torchrun, mpirun (Open MPI, MPICH) or srun; None without
    them.

    mpirun and srun give no address: on one machine the port is derived from the name of the job; on
    several the user must set MASTER_ADDR. Raises UserError.
    """
    for launcher in _LAUNCHERS:
        if launcher.rank in variables and launcher.world_size in variables:
            return _by_launcher(launcher, variables)
    return None


def without_srun(variables: Mapping[str, str] = os.environ) -> str | None:
    """Returns a line for the user if this process is none of the several tasks of a Slurm job."""
    tasks = variables.get("SLURM_NTASKS", "1")
    if tasks == "1" or environment(variables) is not None:
        return None
    return (
        f"Slurm has given this job {tasks} tasks, but without srun all workers run on this machine:"
        " put srun before pd-train to have one in each task"
    )


def _by_launcher(launcher: _Launcher, variables: Mapping[str, str]) -> RankInfo:
    rank = _number(variables, launcher.rank)
    world_size = _number(variables, launcher.world_size)
    local_rank = _number(variables, launcher.local_rank, rank)
    local_world_size = _number(variables, launcher.local_world_size, world_size)
    if rank >= world_size:
        raise UserError(
            f"{launcher.rank}={rank}, but {launcher.world_size}={world_size}: ranks count from 0"
        )
    address = variables.get("MASTER_ADDR")
    if address is None and local_world_size < world_size:
        raise UserError(
            "the workers are on several machines: set MASTER_ADDR to that of rank 0 "
            "(mpirun -x MASTER_ADDR=HOST)"
        )
    port = _number(variables, "MASTER_PORT", _port(launcher, variables))
    return RankInfo(rank, world_size, local_rank, local_world_size, address or LOCALHOST, port)


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    # SLURM writes `4(x2)` for four tasks on each of two machines.
    digits = (text or "").partition("(")[0]
    if not (digits.isascii() and digits.isdigit()):
        raise UserError(f"{name}={text}: this environment variable must be a number")
    return int(digits)


def _port(launcher: _Launcher, variables: Mapping[str, str]) -> int:
    """Returns a port that is equal for all ranks of a job and differs between jobs."""
    known = [variables[name] for name in launcher.job if name in variables]
    job = ".".join(known) or str(os.getppid())
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def restarts() -> int:
    """Returns the number of times that the launcher has restarted this run after a failure."""
    return int(os.environ.get(RESTARTS, "0") or 0)


def let_rank_0_speak() -> None:
    """Waits, on ranks other than 0, before an error that all ranks may have is printed.

    If rank 0 has the same error, their launcher stops them meanwhile.
    """
    rank_info = environment()
    if rank_info is not None and rank_info.rank > 0:
        time.sleep(_UNTIL_RANK_0_HAS_SPOKEN)


def alone() -> RankInfo:
    """Returns the only rank of a run. Raises UserError if no port is free."""
    return RankInfo(0, 1, 0, 1, LOCALHOST, free_port())


def free_port() -> int:
    """Returns a free port, outside the range that the system assigns: while the workers import
    their libraries, another program could be assigned one of those.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOCALHOST, port))
            return port
    raise UserError(f"no port from {PORTS[0]} to {PORTS[-1]} is free for the workers to meet at")
