"""A value goes to the host while the GPU is given more to do; nobody waits for all of that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from pipedream.comm.device.host_copy import HostCopy
from pipedream.runtime.report.summary import Losses


class OnGpu(Tensor):
    """Says that it is on a GPU, and may be copied from there only while the host goes on."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.copy_:
            target, source = args
            assert kwargs == {"non_blocking": True}
            return target.copy_(source.as_subclass(Tensor))
        assert function.__name__ in ("__get__", "as_subclass", "detach"), function
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []

    class Event:
        def record(self, stream: str) -> None:
            told.append(f"recorded on {stream}")

        def synchronize(self) -> None:
            told.append("waited for")

    empty = torch.empty

    def pinned(*shape: Any, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        return empty(*shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "passes")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return told


def test_a_copy_waits_for_nothing_but_itself(log: list[str]) -> None:
    copy = HostCopy.begin(torch.tensor(2.5).as_subclass(OnGpu))
    assert log == ["recorded on passes"]
    assert copy.wait().item() == 2.5
    assert log == ["recorded on passes", "waited for"]


def test_a_tensor_of_the_host_is_no_copy() -> None:
    tensor = torch.ones(2)
    assert HostCopy.begin(tensor).wait() is tensor


def test_losses_reach_rank_0_without_a_look_at_a_gpu(log: list[str]) -> None:
    """The thread that sends them looked: it waited for all that the GPU had to do by then."""
    losses = Losses(HashStore(), 1, 2, device=torch.device("cuda", 0))
    for minibatch, loss in enumerate((1.5, 0.5)):
        losses.send(minibatch, torch.tensor(loss).as_subclass(OnGpu))
    losses.end()
    assert losses.received() == [(0, 1.5), (1, 0.5)]
    assert log.count("recorded on passes") == log.count("waited for") == 2
