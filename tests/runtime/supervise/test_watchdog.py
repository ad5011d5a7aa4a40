"""Ranks that watch one another through the store."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import small_models
import torch
from commands import typed_together
from plans import cut, make_plan
from processes import free_port
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from pipedream.capture.export import capture
from pipedream.comm.messages import PeerLost
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.plan import write_plan
from pipedream.runtime.supervise.launch import PEER_LOST
from pipedream.runtime.supervise.watchdog import Watchdog


class Frozen:
    """A store that a rank sees until it is stopped; then its calls do not return."""

    def __init__(self, store: HashStore, stopped: threading.Event) -> None:
        self.store, self.stopped = store, stopped

    def _call(self, name: str, *arguments: object) -> object:
        while self.stopped.is_set():
            time.sleep(0.01)
        return getattr(self.store, name)(*arguments)

    def __getattr__(self, name: str) -> object:
        return lambda *arguments: self._call(name, *arguments)


class Ring:
    """Ranks with a Watch each, that may be stopped one by one; what was said of the lost."""

    def __init__(self, ranks: int, host: int | None = None, timeout: float = 1.0) -> None:
        store = HashStore()
        self.said: dict[int, str] = {}
        self.stopped = [threading.Event() for _ in range(ranks)]
        self.watchdogs = [
            Watchdog(
                Frozen(store, stopped),  # type: ignore[arg-type]
                rank,
                ranks,
                timeout,
                host,
                lambda line, rank=rank: self.said.setdefault(rank, line),  # type: ignore[misc]
            )
            for rank, stopped in enumerate(self.stopped)
        ]

    def all_say(self, words: Sequence[str]) -> None:
        for watchdog, its in zip(self.watchdogs, words, strict=True):
            watchdog.say(its)


def until(condition: object, seconds: float = 20.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.fixture
def rings() -> Iterator[list[Ring]]:
    """Those that a test makes; their threads end with it."""
    made: list[Ring] = []
    yield made
    for ring in made:
        for stopped, watchdog in zip(ring.stopped, ring.watchdogs, strict=True):
            stopped.clear()
            watchdog.end()


@pytest.mark.slow
def test_all_name_the_one_that_stands_still(rings: list[Ring]) -> None:
    """Also those that are not its neighbours."""
    rings.append(ring := Ring(4))
    ring.all_say([f"in epoch 1 at {rank}F7, minibatch 7" for rank in range(4)])
    time.sleep(0.3)
    ring.stopped[2].set()
    until(lambda: {0, 1, 3} <= ring.said.keys())
    line = "rank 2 has not responded for 1 s in epoch 1 at 2F7, minibatch 7"
    assert [ring.said[rank] for rank in (0, 1, 3)] == [line] * 3


@pytest.mark.thorough
@pytest.mark.slow
def test_one_of_two_that_stand_still_is_named(rings: list[Ring]) -> None:
    """By who comes after them: the other's neighbour stands still, too."""
    rings.append(ring := Ring(4))
    ring.all_say(["at work"] * 4)
    time.sleep(0.3)
    ring.stopped[1].set()
    ring.stopped[2].set()
    until(lambda: {0, 3} <= ring.said.keys())
    assert ring.said[0] == ring.said[3] == "rank 2 has not responded for 1 s at work"


@pytest.mark.slow
def test_all_name_the_one_whose_gpu_hangs(rings: list[Ring]) -> None:
    """It says so itself, since it still beats, and ends as the others do."""
    rings.append(ring := Ring(3))
    ring.all_say(["at work"] * 3)
    looked: list[float] = []

    def look(seconds: float) -> str | None:
        looked.append(seconds)
        return "has not responded for 1 s at 1F7" if sum(looked) > 0.3 else None

    ring.watchdogs[1].look = look
    until(lambda: {0, 1, 2} <= ring.said.keys())
    assert set(ring.said.values()) == {"rank 1 has not responded for 1 s at 1F7"}


@pytest.mark.thorough
@pytest.mark.slow
def test_nobody_stands_still_who_is_at_the_same_action_for_long(rings: list[Ring]) -> None:
    rings.append(ring := Ring(2))
    ring.all_say(["at a long action"] * 2)
    time.sleep(2.0)
    assert not ring.said


@pytest.mark.slow
def test_one_that_has_not_begun_or_has_ended_may_stand_still(rings: list[Ring]) -> None:
    rings.append(ring := Ring(3))
    ring.all_say(["", "at work", "at work"])
    time.sleep(0.3)
    ring.stopped[0].set()
    ring.watchdogs[1].end()
    time.sleep(2.0)
    assert not ring.said


@pytest.mark.slow
def test_one_that_goes_on_after_it_was_stopped_suspects_nobody(rings: list[Ring]) -> None:
    rings.append(ring := Ring(2))
    ring.all_say(["at work"] * 2)
    time.sleep(0.3)
    for stopped in ring.stopped:
        stopped.set()
    time.sleep(1.5)
    for stopped in ring.stopped:
        stopped.clear()
    time.sleep(0.5)
    assert not ring.said


@pytest.mark.slow
def test_the_host_of_the_store_is_known_by_its_silence(rings: list[Ring]) -> None:
    """All calls of all ranks hang, since it is it that would answer."""
    rings.append(ring := Ring(3, host=0))
    ring.all_say([f"at {rank}F7" for rank in range(3)])
    time.sleep(0.5)
    for stopped in ring.stopped:
        stopped.set()
    until(lambda: {1, 2} <= ring.said.keys())
    assert ring.said == dict.fromkeys((1, 2), "rank 0 has not responded for 1 s at 0F7")


@pytest.mark.slow
def test_an_error_is_told_with_where_the_lost_one_was(rings: list[Ring]) -> None:
    rings.append(ring := Ring(3))
    ring.all_say(["at 0F7", "at 1F6", ""])
    until(lambda: ring.watchdogs[0].store.check(["watchdog/1"]))
    time.sleep(0.3)
    explained = ring.watchdogs[0].explained
    lost = "no message from rank 1 (at 0RG7)"
    assert explained(PeerLost(lost, 1)) == f"{lost}; rank 1 was last heard of at 1F6"
    assert explained(PeerLost("no message from rank 2", 2)) == "no message from rank 2"
    assert explained(PeerLost("no replica", None)) == "no replica"


CONFIG = """\
format: pipedream-run/1
model: {source: "small_models:Noisy"}
data: {source: "small_models:deadly", args: {rank: 2, seconds: 20}}
optimizer: {name: SGD, args: {lr: 0.1}}
batch_size: 4
epochs: 9
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_every_rank_of_a_run_names_the_one_that_was_stopped(tmp_path: Path) -> None:
    """Within --timeout, under a launcher that knows nothing of it."""
    graph = capture(small_models.Noisy(), (torch.randn(4, 6),)).graph
    write_plan(make_plan(graph, cut(graph, 3), (1, 1, 1)), tmp_path / "plan.json")
    (tmp_path / "run.yaml").write_text(CONFIG)
    port, first = free_port(), {"TORCHELASTIC_RESTART_COUNT": "0"}
    places = [RankInfo(rank, 3, rank, 3, "127.0.0.1", port).variables() for rank in range(3)]
    train = ["pd-train", "plan.json", "--config", "run.yaml", "--timeout", "10", "--unchecked"]
    files = [{"TORCHELASTIC_ERROR_FILE": str(tmp_path / f"{rank}.json")} for rank in range(3)]
    variables = [{**first, **place, **file} for place, file in zip(places, files, strict=True)]
    done = typed_together(tmp_path, train, variables)
    assert [each.code for each in done] == [PEER_LOST, PEER_LOST, -9]
    for rank in range(2):
        (line,) = (line for line in done[rank].error.splitlines() if "pd-train: " in line)
        assert re.fullmatch(
            rf"pd-train: rank {rank}: rank 2 has not responded for 10 s in epoch \d at 2\S+, "
            r"minibatch \d+",
            line,
        )
        failure = ProcessFailure(rank, 1, PEER_LOST, str(tmp_path / f"{rank}.json"))
        recorded = cast("dict[str, str]", failure.message)  # torchrun cites it in its summary
        assert line == f"pd-train: rank {rank}: {recorded['message']}"
