"""Which process of a run this is, in the words of each launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipedream.comm.rank_info import RankInfo, environment, without_srun
from pipedream.graph.errors import UserError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-7805@1",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
}


def test_no_launcher_no_place():
    assert environment({"PATH": "/bin", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


def test_place_in_torchruns_words_reads_back():
    rank_info = RankInfo(3, 8, 1, 2, "10.0.0.1", 29500)
    assert environment(rank_info.variables()) == rank_info


def test_place_under_mpirun():
    rank_info = environment(OPEN_MPI)
    assert rank_info == RankInfo(1, 4, 1, 4, "127.0.0.1", rank_info.master_port)
    other_rank = environment(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"})
    other_job = environment(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-host-7806@1"})
    assert other_rank.master_port == rank_info.master_port != other_job.master_port
    assert environment(OPEN_MPI | {"MASTER_PORT": "4321"}).master_port == 4321


def test_place_under_mpich_and_slurm():
    assert environment({"PMI_RANK": "1", "PMI_SIZE": "2"}).rank == 1
    rank_info = environment(SLURM | {"MASTER_ADDR": "node0"})
    assert rank_info == RankInfo(3, 4, 1, 2, "node0", rank_info.master_port)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        (
            {"RANK": "one", "WORLD_SIZE": "2"},
            "RANK=one: this environment variable must be a number",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, but WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "-1"}, "MASTER_PORT=-1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "set MASTER_ADDR"),
        (SLURM, "set MASTER_ADDR"),
    ],
)
def test_bad_places_are_one_line(variables, problem):
    with pytest.raises(UserError, match=problem):
        environment(variables)


@pytest.mark.slow
def test_mpirun_for_real():
    """Four workers of one job meet at one place; another job meets elsewhere."""
    mpirun = Path(sys.executable).parent / "mpirun"
    if not mpirun.exists():
        pytest.skip("no mpirun here")
    code = "from pipedream.comm.rank_info import environment; print(environment())"
    command = [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, "-c"]
    places = []
    for _ in range(2):
        done = subprocess.run([*command, code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len({line.partition("master")[2] for line in lines}) == 1
        assert sorted(int(line.partition("rank=")[2][0]) for line in lines) == [0, 1, 2]
        assert all("world_size=3, local_rank=" in line for line in lines)
        places.append(lines[0].partition("master")[2])
    assert places[0] != places[1]


def test_a_job_of_slurm_without_srun_is_noticed() -> None:
    """With SLURM_NTASKS=2 the whole plan ran in the shell of the batch job, without a word."""
    assert without_srun({}) is None
    assert without_srun({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    told = without_srun({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"})
    assert told is not None
    assert "2 tasks" in told
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    assert without_srun(step) is None
