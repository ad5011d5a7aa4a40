"""Ranks that hang or are gone where the host waits for nothing, in runs with NCCL's order.

Each is found within --timeout, by pd-train's launcher or by the ranks' watch on one another, and
the message is that of gloo.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import small_models
import strict_nccl
import torch
from commands import Done, typed_together
from fake_device import FakeDevice
from plans import cut, make_plan
from processes import free_port

from pipedream.capture.export import capture
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.plan import write_plan
from pipedream.runtime.supervise.device_progress import DeviceProgress
from pipedream.runtime.supervise.launch import PEER_LOST

CONFIG = """\
format: pipedream-run/1
model: {{source: "small_models:Noisy"}}
data: {{source: "small_models:{data}", args: {args}}}
optimizer: {{name: SGD, args: {{lr: 0.1}}}}
batch_size: 4
epochs: 100000
"""
STOPPED = CONFIG.format(data="deadly", args="{rank: 2, seconds: 12}")
KILLED = CONFIG.format(data="deadly", args="{rank: 2}")
HEALTHY = CONFIG.format(data="classes", args="{}")
TRAIN = ["pd-train", "plan.json", "--config", "run.yaml", "--unchecked", "--timeout"]

pytestmark = pytest.mark.slow


class OneHangs(FakeDevice):
    """A device that hangs in a pass of rank 1; those of the others wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.actions = 0

    def given(self) -> None:
        self.actions += 1
        waits = re.search(r" at [\d.]+(RA|RG|AR|N)\d", self.progress.words) is not None
        if self.actions > 100 and waits == (os.environ["RANK"] != "1"):
            self.hang()

    @staticmethod
    def progress_of(_: torch.device, timeout: float) -> DeviceProgress:
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"  # else torch would end the rank
        device = OneHangs()
        device.progress = DeviceProgress(device.event, timeout)
        return device.progress

    progress: DeviceProgress


def one_hangs() -> None:
    strict_nccl.install()
    DeviceProgress.of = OneHangs.progress_of  # type: ignore[assignment]


def train(
    folder: Path,
    config: str,
    launched: bool,
    prepare: Callable[[], None] = strict_nccl.install,
    timeout: int = 6,
) -> list[Done]:
    """Three ranks; under pd-train's launcher, which is all that is returned, or each alone."""
    graph = capture(small_models.Noisy(), (torch.randn(4, 6),)).graph
    write_plan(make_plan(graph, cut(graph, 3), (1, 1, 1)), folder / "plan.json")
    (folder / "run.yaml").write_text(config)
    port = free_port()
    ranks = [RankInfo(rank, 3, rank, 3, "127.0.0.1", port).variables() for rank in range(3)]
    each = [{"TORCHELASTIC_RESTART_COUNT": "0", **rank} for rank in ranks]
    places = [{}] if launched else each
    return typed_together(folder, [*TRAIN, str(timeout)], places, prepare=prepare)


def said(done: Done) -> str:
    """The one line that is for the user."""
    (line,) = (line for line in done.error.splitlines() if "pd-train: " in line)
    assert "Traceback" not in done.error
    return line


class Followed(FakeDevice):
    """A device that does everything; `phases` is a file of what the rank says of its actions."""

    progress: DeviceProgress

    def given(self) -> None:
        with Path("phases").open("a") as file:
            file.write(self.progress.words.partition(", minibatch")[0] + "\n")

    @staticmethod
    def progress_of(_: torch.device, timeout: float) -> DeviceProgress:
        device = Followed()
        device.progress = DeviceProgress(device.event, timeout)
        return device.progress


def followed() -> None:
    DeviceProgress.of = Followed.progress_of  # type: ignore[assignment]


def test_the_gpu_is_followed_whatever_the_rank_does(tmp_path: Path) -> None:
    graph = capture(small_models.Noisy(), (torch.randn(4, 6),)).graph
    write_plan(make_plan(graph, cut(graph, 1), (1,)), tmp_path / "plan.json")
    (tmp_path / "run.yaml").write_text(HEALTHY.replace("100000", "1\nevaluate_every: 1"))
    command = ["pd-train", "plan.json", "--config", "run.yaml"]
    (done,) = typed_together(tmp_path, command, [{}], prepare=followed)
    assert done.code == 0, done.error
    phases = set((tmp_path / "phases").read_text().splitlines())
    held_out = "at the held-out data after epoch 1"
    assert phases >= {"at the self-check", "in epoch 1 at 0F0", "in epoch 1 at 0U0@1", held_out}


STANDS_STILL = r"rank 2 has not responded for 6 s in epoch \d+ at 2\S+, minibatch \d+"
A_BEAT_AGO = (
    r"rank 2 has not responded for 6 s (in epoch \d+ at 2\S+, minibatch \d+|at the first .*)"
)
"""As ranks know of each other: it is stopped within a beat of its first minibatch."""
HANGS = r"rank 1 has not responded for 6 s in epoch \d+ at 1\S+, minibatch \d+ \(on its GPU\)"


@pytest.mark.parametrize(
    ("config", "prepare", "line"),
    [
        pytest.param(STOPPED, strict_nccl.install, STANDS_STILL, marks=pytest.mark.thorough),
        (HEALTHY, one_hangs, HANGS),
    ],
    ids=["stopped", "its GPU hangs"],
)
def test_the_launcher_names_a_rank_that_hangs(
    tmp_path: Path, config: str, prepare: Callable[[], None], line: str
) -> None:
    (done,) = train(tmp_path, config, launched=True, prepare=prepare)
    assert done.code == 1
    assert re.fullmatch(rf"pd-train: {line}; all workers stopped", said(done)), done.error


@pytest.mark.parametrize(
    ("config", "prepare", "line", "noticing"),
    [
        (STOPPED, strict_nccl.install, A_BEAT_AGO, 2),
        pytest.param(HEALTHY, one_hangs, HANGS, 3, marks=pytest.mark.thorough),
    ],
    ids=["stopped", "its GPU hangs"],
)
def test_every_rank_names_one_that_hangs(
    tmp_path: Path, config: str, prepare: Callable[[], None], line: str, noticing: int
) -> None:
    """Under torchrun and mpirun: that whose GPU hangs ends by itself, too."""
    done = train(tmp_path, config, launched=False, prepare=prepare)
    assert [each.code for each in done[:noticing]] == [PEER_LOST] * noticing
    for rank, each in enumerate(done[:noticing]):
        assert re.fullmatch(rf"pd-train: rank {rank}: {line}", said(each)), each.error


def test_those_who_have_lost_one_that_was_killed_say_so_in_one_line(tmp_path: Path) -> None:
    done = train(tmp_path, KILLED, launched=False, timeout=60)
    assert [each.code for each in done] == [PEER_LOST, PEER_LOST, -9]
    lost = "(no message from|cannot (send to|receive from)) rank|a message did not arrive"
    for rank, each in enumerate(done[:2]):
        assert re.match(rf"pd-train: rank {rank}: ({lost})", said(each)), each.error
