"""The network between real ranks: levels, the fit, the measurement, the file, what goes wrong."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from commands import PROGRAMS, typed
from processes import free_port, run_processes

from pipedream.comm.rank_info import RankInfo
from pipedream.graph.cluster import Link, read_cluster
from pipedream.graph.errors import UserError
from pipedream.graph.plan import read_plan
from pipedream.profiler.network import measure
from pipedream.profiler.network.interference import Steps, Work
from pipedream.profiler.network.levels import NetworkLevel, levels, levels_of, parse_machines
from pipedream.profiler.network.measure import fit_link
from pipedream.profiler.network.options import Effort
from pipedream.profiler.network.wire import Wire
from pipedream.profiler.timing import stopwatch

NETWORK = ("pd-profile", "--network")
QUICK = ("--largest", "60kB", "--repeats", "3", "--warmup", "1")
ONE_RANK_OF_TWO = RankInfo(0, 2, 0, 2, "127.0.0.1", 1).variables()
GRAPH = """
node1 -- Input -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=4000.0, parameter_size=0.0
node2 -- Linear -- forward_compute_time=5.0, backward_compute_time=9.0, activation_size=4000.0, parameter_size=9000.0
node3 -- Linear -- forward_compute_time=5.0, backward_compute_time=9.0, activation_size=4000.0, parameter_size=9000.0
\tnode1 -- node2
\tnode2 -- node3
"""  # noqa: E501


OWN = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
"""

# Levels --------------------------------------------------------------------------------------


def test_pairs_and_groups_differ_at_one_level_alone() -> None:
    inner, outer = levels((4, 2))
    assert (inner.name, inner.count, outer.name, outer.count) == ("device", 4, "machine", 2)
    assert inner.pairs == [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)]
    assert inner.groups == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert outer.pairs == outer.groups == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_of_many_pairs_some_from_everywhere_are_measured() -> None:
    (level,) = levels((100,))
    assert len(level.pairs) == 8
    assert (level.pairs[0], level.pairs[-1]) == ((0, 1), (98, 99))


def test_hosts_tell_the_levels() -> None:
    assert levels_of(["a"] * 3) == levels((3,))
    assert levels_of(["a", "a", "b", "b", "c", "c"]) == levels((2, 3))
    assert levels_of(["a", "b"]) == [NetworkLevel("machine", 2, 1, 2)]


@pytest.mark.parametrize("hosts", [["a", "b", "a", "b"], ["a", "a", "b"]])
def test_uneven_hosts_are_refused(hosts: list[str]) -> None:
    with pytest.raises(UserError, match="say with --machines which belong together"):
        levels_of(hosts)


@pytest.mark.parametrize(
    ("machines", "problem"),
    [("2,2", "4 devices, and 6 ranks"), ("6,1", "leave that level out"), ("x", "whole numbers")],
)
def test_machines_that_are_not_the_ranks_are_refused(machines: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        parse_machines(machines, 6)


# The fit -------------------------------------------------------------------------------------

SIZES = Effort(64_000_000, 0, 1).sizes


def test_sizes_go_up_by_four_to_the_largest() -> None:
    assert (SIZES[0], SIZES[-1], len(SIZES)) == (976, 64_000_000, 9)
    assert all(size % 4 == 0 for size in SIZES)


def test_a_line_is_found_again() -> None:
    line = Link(latency=30e-6, bandwidth=2e9)
    fit = fit_link(SIZES, line.seconds(SIZES).tolist())
    assert fit.line.latency == pytest.approx(30e-6, rel=1e-9)
    assert fit.line.bandwidth == pytest.approx(2e9, rel=1e-9)
    assert fit.miss == pytest.approx(0.0, abs=1e-9)
    assert fit.link == fit.line


def test_small_messages_count_as_much_as_large_ones() -> None:
    """With noise of some percent, which is milliseconds on large ones, latency is still found."""
    noise = 1 + 0.05 * np.array([1, -1, 1, -1, 1, -1, 1, -1, 1])
    fit = fit_link(SIZES, (Link(latency=30e-6, bandwidth=2e9).seconds(SIZES) * noise).tolist())
    assert fit.line.latency == pytest.approx(30e-6, rel=0.1)
    assert fit.line.bandwidth == pytest.approx(2e9, rel=0.1)
    assert fit.link == fit.line


def test_neither_number_is_below_zero() -> None:
    fit = fit_link([1e3, 1e4, 1e5], [1e-6, 3e-5, 4e-4])
    assert (fit.line.latency, fit.line.bandwidth) == (0.0, pytest.approx(7.41e8, rel=0.01))
    falling = fit_link([1e3, 1e4, 1e5], [1.2e-3, 1.1e-3, 1.0e-3])
    assert falling.line.latency == pytest.approx(1.1e-3, rel=0.05)
    assert falling.link.seconds(1e9) < 2e-3


def test_points_where_a_line_is_too_far_off() -> None:
    """A bend; what a larger message did faster is believed of the smaller one."""
    seconds = [40e-6, 30e-6, 31e-6, 300e-6, 1.2e-3]
    fit = fit_link([1e3, 4e3, 16e3, 64e3, 256e3], seconds)
    assert fit.miss > 0.2
    assert [time for _, time in fit.link.points] == [30e-6, 30e-6, 31e-6, 300e-6, 1.2e-3]
    assert fit.miss == pytest.approx(
        max(
            abs(fit.line.seconds(size) / time - 1)
            for (size, _), time in zip(fit.link.points, seconds, strict=True)
        )
    )


# Real ranks ----------------------------------------------------------------------------------

LAUNCHERS = {
    "torchrun": ("torchrun", "--standalone", "--no-python", "--nproc-per-node"),
    "mpirun": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n"),
}


def launched(launcher: str, ranks: int, folder: Path, *words: str) -> subprocess.Popen[str]:
    if not (PROGRAMS / LAUNCHERS[launcher][0]).exists():
        pytest.skip(f"no {launcher} here")
    command = [*LAUNCHERS[launcher], str(ranks), *NETWORK, *words]
    return subprocess.Popen(
        [str(PROGRAMS / command[0]), *command[1:]],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ranks", "machines"), [("torchrun", 4, "2,2"), ("mpirun", 2, None)]
)
def test_the_measured_cluster_is_one_to_plan_for(
    launcher: str, ranks: int, machines: str | None, tmp_path: Path
) -> None:
    more = () if machines is None else ("--machines", machines)
    process = launched(launcher, ranks, tmp_path, "-o", "net", *QUICK, *more)
    out, error = process.communicate(timeout=110)
    assert process.returncode == 0, error
    assert "Written: net/cluster.yaml" in out
    cluster = read_cluster(tmp_path / "net/cluster.yaml")
    assert cluster.machines == ((2,) if machines is None else (2, 2))
    assert cluster.names == ("device", "machine")[: len(cluster.machines)]
    assert cluster.measured
    for link in (*cluster.send, *cluster.all_reduce, *cluster.all_gather):
        assert link is not None
        assert 0 <= link.busy <= 10
        assert 1e-6 < float(link.seconds(60_000)) < 1.0
    assert (tmp_path / "net/network.png").stat().st_size > 10_000
    with (tmp_path / "net/network.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * len(cluster.machines) * len(Effort(60_000, 0, 1).sizes)
    (tmp_path / "graph.txt").write_text(GRAPH)
    done = typed(tmp_path, ["pd-optimize", "graph.txt", "--cluster", "net/cluster.yaml"])
    assert (done.code, done.error) == (0, "")
    assert "cost model network" in done.out
    assert read_plan(tmp_path / "plan/plan.json").cluster == cluster


@pytest.mark.thorough
@pytest.mark.slow
def test_sums_are_measured_beside_passes_of_a_model(tmp_path: Path) -> None:
    """What they lose to each other differs: a sum of 4 MB cost gpt 5.9 ms, and products 4.7 ms."""
    (tmp_path / "own.py").write_text(OWN)
    process = launched("torchrun", 2, tmp_path, "own:model", "--input", "8", "-o", "net", *QUICK)
    out, error = process.communicate(timeout=110)
    assert process.returncode == 0, error
    assert "sums beside passes of own:model" in " ".join(out.split())
    told = (tmp_path / "net/cluster.yaml").read_text()
    assert "sums beside passes of own:model" in told
    (sums,) = read_cluster(tmp_path / "net/cluster.yaml").all_reduce
    assert sums is not None
    assert 0 <= sums.busy <= 10


def test_what_begins_in_a_step_is_spread_over_its_places() -> None:
    """Six places of two runs, three parts: at every second place."""
    begun: list[int] = []
    reached = [0]

    def run(place: Callable[[], None]) -> None:
        for _ in range(3):
            place()
            reached[0] += 1

    def begin() -> Callable[[], None]:
        begun.append(reached[0])
        return lambda: None

    steps = Steps(cast(Wire, None), Work(run, places=3), later=0, runs=2, parts=3)
    steps.step(begin, deque())
    assert begun == [0, 2, 4]


def test_an_all_gather_is_timed_after_work() -> None:
    """Work of 70 ms, gathers of 20 ms but for one. Alone on two cores a small one took 0.04 ms,
    after products, which ranks end at different times, 0.3 ms. What one waits counts: in training
    the mean was 0.35 ms, the median 0.22.
    """
    clock = _Clock()
    clock.reading = 0.0

    def work(place: Callable[[], None]) -> None:
        clock.now += 0.07

    class Gathers:
        device = torch.device("cpu")
        done = 0

        def gatherer(self, size: int, group: tuple[int, ...]) -> Callable[[], None]:
            def gather() -> None:
                self.done += 1
                clock.now += 0.3 if self.done == 2 else 0.02

            return gather

    with patch.object(stopwatch, "time", clock), patch.object(dist, "get_rank", lambda: 0):
        gathering = measure._gathering(cast(Wire, Gathers()), (0, 1), 8000, Work(work, places=1))
        timed = min(measure._MOST_WITH_WORK, measure._count(8000))
        assert gathering() == pytest.approx(0.02 + 0.28 / timed)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_lost_rank_ends_it_with_one_line(tmp_path: Path) -> None:
    """Under no launcher, which would stop the others and tell of it itself."""
    port = free_port()
    command = [str(PROGRAMS / "pd-profile"), "--network", "-o", "net", "--repeats", "10000"]
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **RankInfo(rank, 2, rank, 2, "127.0.0.1", port).variables(),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        wait_for_connection(port, ranks)
        os.kill(ranks[1].pid, signal.SIGKILL)
        out, error = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert (ranks[0].returncode, out) == (2, "")
    assert error.startswith("pd-profile: rank 0: another rank does not answer any more: ")
    assert error.count("\n") == 1


def wait_for_connection(port: int, ranks: list[subprocess.Popen[str]]) -> None:
    """Until the ranks measure: each has begun the threads that send."""
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        names = [
            [path.read_text().strip() for path in Path(f"/proc/{rank.pid}/task").glob("*/comm")]
            for rank in ranks
        ]
        if all("sends" in found for found in names) or all(len(found) > 6 for found in names):
            time.sleep(1.0)
            return
        time.sleep(0.1)


@pytest.mark.slow
def test_compute_that_is_lost_is_found() -> None:
    """20 ms of each step on one rank of two are half a message of 20 ms, on both they are one, also
    where they are lost two steps after the message began; 40 ms are two. Once those of the last
    two messages were not counted: sums that cost all of their time were said to cost half of it,
    and two replicas on one machine took a tenth longer than expected.

    By a clock of the test's own: on a machine with other work to do, 20 ms more are soon found.
    """
    shares = run_processes(_busy_shares, 2, free_port())
    assert shares[0] == shares[1] == pytest.approx([0.0, 0.5, 1.0, 1.0, 2.0, 0.0, 1.0, 2.0])


class _Clock:
    """Goes on by `reading` whenever it is read, and by what it is told."""

    reading = 0.4
    now = 0.0

    def perf_counter(self) -> float:
        self.now += self.reading
        return self.now


def _busy_shares(rank: int, ranks: int, port: int) -> list[float]:
    import torch

    from pipedream.comm.rendezvous import connect_store, join
    from pipedream.profiler.network import interference
    from pipedream.profiler.network.interference import Begin, Seconds, Traffic

    rank_info, device = RankInfo(rank, ranks, rank, ranks, "127.0.0.1", port), torch.device("cpu")
    join(rank_info, connect_store(rank_info, 60.0), "gloo", device, 60.0)
    wire = Wire(device, "gloo", [(0, 1)], [(0, 1)], 60.0)

    clock = _Clock()

    def at_once() -> None:
        clock.now += 0.02

    under_way: deque[Callable[[], None]] = deque()

    def later() -> Callable[[], None]:
        if len(under_way) == 2:
            under_way.popleft()()
        lost = cache(at_once)
        under_way.append(lost)
        return lost

    def twice() -> None:
        clock.now += 0.04

    def share(
        begin: Callable[[], Callable[[], None] | None],
        kind: Callable[[Seconds, Begin], Traffic] = Traffic.messages,
    ) -> float:
        """Of what begins so; a few bytes take nothing."""
        traffic = kind(lambda _: 0.02, lambda size: begin if size > 4 else lambda: None)
        return interference.busy(wire, (0, 1), Effort(20_000, 0, 3), traffic, Work.product(device))

    small = patch.multiple(interference, _ROWS=1, _WIDTH=8)
    with small, patch.object(interference, "time", clock):
        half = at_once if rank == 0 else lambda: None
        messages = [share(begin) for begin in (lambda: None, half, at_once, later, twice)]
        return [
            *messages,
            *(share(begin, Traffic.sums) for begin in (lambda: None, at_once, lambda: twice)),
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "variables", "problem"),
    [
        ((), {}, "this is the only process: start several, such as torchrun"),
        ((), {"RANK": "0", "WORLD_SIZE": "1"}, "only one rank was started"),
        (("resnet.py",), ONE_RANK_OF_TWO, "MODEL 'resnet.py': write torchvision:NAME"),
        (("vgg:nn", "--batch-sizes", "1,2"), ONE_RANK_OF_TWO, "--batch-sizes does not go with"),
        (("--machines", "2,2"), ONE_RANK_OF_TWO, "4 devices, and 2 ranks were started"),
        (("--batch-size", "4"), ONE_RANK_OF_TWO, "--batch-size is for a MODEL"),
        (("--largest", "1kB"), ONE_RANK_OF_TWO, "--largest 1kB: give from"),
        (("--largest", "many"), ONE_RANK_OF_TWO, "--largest: 'many' is not an amount"),
        (("--device", "tpu"), ONE_RANK_OF_TWO, "--device tpu"),
        (("-o", "file"), ONE_RANK_OF_TWO, "-o file: this is a file, not a folder"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], variables: dict[str, str], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = typed(tmp_path, [*NETWORK, "-o", "net", *words], variables)
    assert done.code == 2
    assert problem in done.error
    assert done.error.count("\n") == 1


@pytest.mark.slow
def test_a_model_knows_no_machines(tmp_path: Path) -> None:
    done = typed(tmp_path, ["pd-profile", "-o", "x", "torchvision:vgg11", "--machines", "2"])
    assert (done.code, done.out) == (2, "")
    assert "--machines goes with --network" in done.error
    assert "MODEL is missing" in typed(tmp_path, ["pd-profile", "-o", "x"]).error
