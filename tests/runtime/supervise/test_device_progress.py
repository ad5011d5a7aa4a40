"""How far a GPU has come, with events that a fake one reaches or does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from fake_device import FakeDevice

from pipedream.runtime.supervise import device_progress
from pipedream.runtime.supervise.device_progress import DeviceProgress
from pipedream.schedule.action import Action, Kind

TIMEOUT = 10.0
FORWARD, RECEIVE = Action(Kind.FORWARD, 1, 0, 7, 0), Action(Kind.RECV_ACTIVATION, 1, 0, 7, 0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    monkeypatch.setattr(device_progress, "_SECONDS_BETWEEN_LOOKS", 0.002)
    return FakeDevice()


def do(progress: DeviceProgress, action: Action) -> None:
    progress.words = f"at {action}"
    progress.begin(action)
    progress.given()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


def found_after(progress: DeviceProgress, seconds: int) -> str | None:
    """What is found in so many looks, a second apart."""
    return next(filter(None, (progress.look(1.0) for _ in range(seconds))), None)


def test_a_gpu_that_hangs_in_a_pass_does_not_respond(device: FakeDevice) -> None:
    """While its host goes on: it is named for where the GPU is, which is behind."""
    progress = DeviceProgress(device.event, TIMEOUT)
    do(progress, RECEIVE)
    until(lambda: progress.reached == 1 and progress.at is None)
    device.hang()
    do(progress, FORWARD)
    for minibatch in range(8, 12):
        do(progress, FORWARD._replace(minibatch=minibatch))
    until(lambda: progress.at)
    assert found_after(progress, 8) is None
    assert found_after(progress, 2) == "has not responded for 10 s at 1F7 (on its GPU)"


def test_one_whose_host_is_blocked_amid_a_pass_is_found_too(device: FakeDevice) -> None:
    """It looks at a number, say, before all of the pass is given to the GPU."""
    progress = DeviceProgress(device.event, TIMEOUT)
    progress.words = "at 1F7"
    device.hang()
    progress.begin(FORWARD)
    until(lambda: progress.at)
    assert found_after(progress, 10) == "has not responded for 10 s at 1F7 (on its GPU)"


def test_one_that_waits_for_others_is_given_twice_as_long(device: FakeDevice) -> None:
    progress = DeviceProgress(device.event, TIMEOUT)
    device.hang()
    do(progress, RECEIVE)
    until(lambda: progress.at)
    assert found_after(progress, 20) is None
    line = "has waited for 20 s at 1RA7, and no rank is known to be behind"
    assert found_after(progress, 2) == line


@pytest.mark.parametrize("kind", [Kind.RECV_GRADIENT, Kind.ALL_REDUCE, Kind.NORM])
def test_sums_wait_for_others_too(device: FakeDevice, kind: Kind) -> None:
    progress = DeviceProgress(device.event, TIMEOUT)
    progress.begin(FORWARD._replace(kind=kind))
    assert progress.begun is not None
    assert progress.begun.waits


def test_one_that_has_nothing_to_do_is_not_stuck(device: FakeDevice) -> None:
    """Nor is one that waits for its data amid a pass: the GPU has done all that it was given."""
    progress = DeviceProgress(device.event, TIMEOUT)
    do(progress, FORWARD)
    until(lambda: progress.reached == 1 and progress.at is None)
    assert found_after(progress, 100) is None
    progress.begin(FORWARD)
    for _ in range(50):
        before = progress.reached
        until(lambda before=before: progress.reached > before)  # type: ignore[misc]
        assert progress.look(1.0) is None


def test_one_that_goes_on_in_time_begins_anew(device: FakeDevice) -> None:
    progress = DeviceProgress(device.event, TIMEOUT)
    for _ in range(3):
        device.hang()
        do(progress, FORWARD)
        until(lambda: progress.at)
        assert found_after(progress, 7) is None
        device.goes_on.set()
        until(lambda: progress.at is None)


def test_events_are_used_again(device: FakeDevice) -> None:
    progress = DeviceProgress(device.event, TIMEOUT)
    for number in range(100):
        do(progress, FORWARD)
        until(lambda number=number: progress.reached > number)  # type: ignore[misc]
    assert device.events <= 2


def test_a_gpu_has_events_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits for them would else begin to use GPU 0."""
    device, used, made = FakeDevice(), list[tuple[object, str]](), list[bool]()
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda where: used.append((where, threading.current_thread().name)),
    )

    def event(blocking: bool) -> object:
        made.append(blocking)
        return device.event()

    monkeypatch.setattr(torch.cuda, "Event", event)
    progress = DeviceProgress.of(torch.device("cuda", 3), TIMEOUT)
    assert progress is not None
    do(progress, FORWARD)
    until(lambda: progress.reached)
    assert used == [(torch.device("cuda", 3), "device")]
    assert made == [True]


def test_a_cpu_has_none() -> None:
    assert DeviceProgress.of(torch.device("cpu"), TIMEOUT) is None
