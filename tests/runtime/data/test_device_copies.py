"""Minibatches are copied to a GPU one ahead, on a stream beside that of the passes."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from pipedream.comm.device.threads import start_thread
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import DataFactory, Factory, RunConfig
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.data.reader import Epoch, Reader

GPU = torch.device("cuda", 1)
LAST = 4


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for {event.recorded}")


class FakeEvent:
    device = GPU
    made = 0

    def record(self, stream: FakeStream) -> None:
        assert stream.name == "side"
        self.recorded, FakeEvent.made = FakeEvent.made, FakeEvent.made + 1


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU that is made up is asked to do, by minibatch."""
    told: list[str] = []
    current, FakeEvent.made = FakeStream(told, "passes"), 0

    def number(tensor: Tensor) -> int:
        return int(tensor.flatten()[0])

    def to(batch: Batch, device: torch.device, non_blocking: bool = False) -> Batch:
        assert (device, non_blocking, inside) == (GPU, True, ["side"])
        told.append(f"copy {batch.target.item()}")
        return batch

    inside: list[str] = []

    class On(AbstractContextManager[None]):
        def __init__(self, stream: FakeStream) -> None:
            inside.append(stream.name)

        def __exit__(self, *_: object) -> None:
            inside.clear()

    def keep(tensor: Tensor, stream: Any) -> None:
        told.append(f"keep {number(tensor)}")

    def pin(tensor: Tensor) -> Tensor:
        told.append(f"pin {number(tensor)} in {threading.current_thread().name}")
        return tensor

    def set_device(device: torch.device) -> None:
        told.append(f"{device} in {threading.current_thread().name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(told, "side"))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "record_stream", keep)
    monkeypatch.setattr(Batch, "to", to)
    return told


class Numbers:
    """Minibatch b is b; `broken` cannot be read."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return LAST + 1

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.broken:
            raise UserError(f"no example {index}")
        return torch.full((2,), float(index)), index


def reader(dataset: Numbers, draws: bool = True) -> Reader:
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="a:b"),
        data=DataFactory(source="a:b"),
        batch_size=1,
    )
    numbers = range(len(dataset))
    return Reader(Epoch(dataset, config, 0, GPU, draws=draws, order=numbers), numbers)


def test_each_is_copied_when_the_one_before_is_asked_for(log: list[str]) -> None:
    """Copies were blocking, of pageable memory, in the pass that needed them."""
    told = []
    with reader(Numbers()) as data:
        for number in range(LAST + 1):
            assert data.inputs(number, [0])[0].tolist() == [[number, number]]
            assert data.target(number).item() == number
            told.append([words for words in log if not words.startswith("pin")])
            log.clear()
    kept = [[f"passes waits for {n}", f"keep {n}", f"keep {n}"] for n in range(LAST + 1)]
    ahead = [[*own, f"copy {n + 1}"] for n, own in enumerate(kept[:-1])]
    assert told == [["copy 0", *ahead[0]], *ahead[1:], kept[-1]]


def test_what_cannot_be_read_is_told_where_it_is_asked_for(log: list[str]) -> None:
    with reader(Numbers(broken=2)) as data:
        data.target(0)
        data.target(1)
        with pytest.raises(UserError, match="no example 2"):
            data.target(2)


def test_the_thread_that_reads_pins_on_the_device_of_its_rank(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA begins each thread with the first GPU, whichever the rank has."""
    monkeypatch.setattr("pipedream.runtime.data.reader._HANDING_OVER", 0.0)
    with reader(Numbers(), draws=False) as data:
        for number in range(LAST + 1):
            data.target(number)
    own = [words for words in log if words.endswith("in data")]
    assert own[:3] == ["cuda:1 in data", "pin 3 in data", "pin 3 in data"]


@pytest.mark.parametrize(("device", "expected"), [(GPU, ["cuda:1 in x"]), ("cpu", [])])
def test_threads_begin_on_the_device_of_their_rank(
    device: Any, expected: list[str], log: list[str]
) -> None:
    start_thread(lambda: None, "x", torch.device(device)).join()
    assert log == expected
