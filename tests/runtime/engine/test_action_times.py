"""When a rank did its actions: a device that runs behind the host, and whose clock goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu import CUDA, FakeGpu

from pipedream.graph.timeline import Event
from pipedream.runtime.engine.action_times import ActionTimes
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.run.training_segment import TrainingSegment
from pipedream.schedule.action import Action, Kind, parse_action

TIME = "pipedream.runtime.engine.action_times.time"
FORWARD, BACKWARD, UPDATE = (parse_action(text) for text in ("0F0", "0B0", "0U0@1"))
SECONDS = {Kind.FORWARD: 0.010, Kind.BACKWARD: 0.020, Kind.UPDATE: 0.0}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    fake.stand_in(monkeypatch, TIME)
    return fake


def call(times: ActionTimes, gpu: FakeGpu, action: Action, seconds: float) -> None:
    begin = times.mark()
    gpu.launch(seconds)
    times.add(action, begin)


def spans(events: list[Event], origin: float) -> list[tuple[float, float]]:
    return [(event.begin - origin, event.end - origin) for event in events]


def test_an_action_takes_what_it_takes_the_device(gpu: FakeGpu) -> None:
    times = ActionTimes.on(CUDA)
    times.begin()
    begin = gpu.host
    call(times, gpu, FORWARD, 0.010)
    call(times, gpu, BACKWARD, 0.020)
    assert gpu.host - begin < 1e-4  # the host is far ahead
    times.end()
    assert [event.action for event in times.events] == [FORWARD, BACKWARD]
    expected = [(0, 0.010), (0.010, 0.030)]
    for span, right in zip(spans(times.events, begin), expected, strict=True):
        assert span == pytest.approx(right, abs=1e-5)


def test_nothing_waits_for_the_device_while_it_trains(gpu: FakeGpu) -> None:
    times = ActionTimes.on(CUDA)
    times.begin()
    waits = gpu.waits
    call(times, gpu, FORWARD, 0.010)
    call(times, gpu, BACKWARD, 0.020)
    assert times.events == []
    assert times.under_way(UPDATE) == FORWARD
    gpu.call(0.015)
    assert times.under_way(UPDATE) == BACKWARD
    assert [event.action for event in times.events] == [FORWARD]
    gpu.call(0.015)
    assert times.under_way(UPDATE) == UPDATE
    assert times.under_way(None) is None
    assert [event.action for event in times.events] == [FORWARD, BACKWARD]
    assert gpu.waits == waits


def test_the_device_s_clock_is_compared_at_both_ends_of_a_segment(gpu: FakeGpu) -> None:
    """Half an hour by a clock that is 50 millionths fast, of passes of 1.5 s: 90 ms at its end.
    And a segment before it stays as it was.
    """
    gpu.fast = 1 + 50e-6
    times = ActionTimes.on(CUDA)
    times.begin()
    call(times, gpu, UPDATE, 1.0)
    times.end()
    before, gpu.host = list(times.events), gpu.host + 60
    times.begin()
    begin, passes = gpu.host, 1200
    for _ in range(passes):
        call(times, gpu, FORWARD, 1.5)
        gpu.host = gpu.free
    assert times.under_way(None) is None
    assert times.events[-1].end - gpu.host > 0.08
    done = gpu.free
    times.end()
    assert times.events[:1] == before
    last = times.events[-1]
    assert last.end - begin == pytest.approx(1.5 * passes, abs=0.01)
    assert last.end == pytest.approx(done, abs=2e-5)
    assert last.end - last.begin == pytest.approx(1.5, abs=2e-6)


def test_short_actions_are_told_apart_late_in_a_long_segment(gpu: FakeGpu) -> None:
    """A 32-bit float of milliseconds does not tell 20 µs from 0 after half an hour."""
    times = ActionTimes.on(CUDA)
    times.begin()
    for _ in range(1800):
        call(times, gpu, UPDATE, 1.0)
        gpu.host = gpu.free
    call(times, gpu, FORWARD, 20e-6)
    times.end()
    forward = times.events[-1]
    assert forward.end - forward.begin == pytest.approx(20e-6, abs=2e-6)


class _Stage:
    """An executor that gives the device work of some seconds for each kind of action."""

    buckets = ()

    def __init__(self, do: Callable[[Action], None]) -> None:
        self.table = dict.fromkeys(SECONDS, do)

    def begin(self, data: Any) -> None: ...
    def follow(self, actions: Any, delays: Any) -> None: ...
    def end(self) -> None: ...


class _Transport:
    is_queued = False

    def drain(self) -> None: ...


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")], ids=str)
def test_the_engine_tells_of_the_device(
    device: torch.device, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a CPU it tells when the call returned, without any event."""

    def on_gpu(action: Action) -> None:
        gpu.launch(SECONDS[action.kind])

    def on_cpu(action: Action) -> None:
        gpu.call(SECONDS[action.kind])

    if device.type == "cpu":
        monkeypatch.delattr(torch.cuda, "Event")
    times = ActionTimes.on(device)
    stage: Any = _Stage(on_gpu if device == CUDA else on_cpu)
    transport: Any = _Transport()
    data: Any = None
    Engine({0: stage}, transport, times=times).run(
        ActionStream(TrainingSegment(0, 1), [FORWARD, BACKWARD, UPDATE]), data
    )
    assert [event.action for event in times.events] == [FORWARD, BACKWARD, UPDATE]
    taken = [event.end - event.begin for event in times.events]
    assert taken == pytest.approx(list(SECONDS.values()), abs=1e-5)
