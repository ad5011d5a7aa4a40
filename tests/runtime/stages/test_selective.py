"""Stages of which some nodes are recomputed learn what others learn, bit for bit, and hold less."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Collection

import pytest
import torch
from one_rank import Data, OneRank, none_halved, regression
from torch import Tensor, nn

from pipedream.capture.captured import Captured
from pipedream.runtime.data.batch import Batch
from pipedream.schedule.action import Action, Kind


class Block(nn.Module):
    """A transformer block with attention written out, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(6), nn.LayerNorm(6)
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        scores = torch.softmax(q @ k.transpose(-2, -1) / 6**0.5, -1)
        x = x + self.out(self.drop(scores) @ v)
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.second(x)))))


class Convolutions(nn.Module):
    """Batch norms, whose statistics are to be written once, and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 1, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(1)])
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norms[0](self.a(x[:, None])))
        h = self.act(self.norms[0](h)).mul_(2.0)
        return self.norms[1](self.b(h))[:, 0] + x


class Shared(nn.Module):
    """A weight that two layers of a stage share, a frozen one, a split and a permanent view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.b.weight = self.a.weight
        self.c.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        one, other = self.c(h).sort(-1)[0].split(3, -1)
        return torch.cat([one.exp(), other.sin() * one], -1)


def blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(3)))


def every(captured: Captured) -> Collection[str]:
    return captured.working


def some(seed: int) -> Callable[[Captured], Collection[str]]:
    def drawn(captured: Captured) -> Collection[str]:
        return [node for node in captured.working if random.Random(f"{seed} {node}").random() < 0.5]

    return drawn


def of_kind(*kinds: str) -> Callable[[Captured], Collection[str]]:
    def chosen(captured: Captured) -> Collection[str]:
        nodes = captured.graph.nodes
        return [node for node in captured.working if nodes[node].description.startswith(kinds)]

    return chosen


def trained(
    model: nn.Module, again: Callable[[Captured], Collection[str]], **more: object
) -> OneRank:
    options: dict[str, object] = {"halved": none_halved, "data": regression(), **more}
    return OneRank(copy.deepcopy(model), again=again, **options).train()  # type: ignore[arg-type]


def none(captured: Captured) -> Collection[str]:
    return ()


@pytest.mark.parametrize("make", [blocks, Convolutions, Shared])
@pytest.mark.parametrize("again", [every, some(1), some(2), some(3)])
@pytest.mark.parametrize("stages", [1, 2])
def test_equal_to_the_plain_run(
    make: Callable[[], nn.Module], again: Callable[[Captured], Collection[str]], stages: int
) -> None:
    torch.manual_seed(3)
    model = make().to(torch.float64)
    plain = trained(model, none, stages=stages)
    selective = trained(model, again, stages=stages)
    assert selective.losses == plain.losses
    for name, tensor in plain.state.items():
        assert torch.equal(tensor, selective.state[name]), name
    assert any(not torch.equal(tensor, plain.state[n]) for n, tensor in model.state_dict().items())


@pytest.mark.parametrize("again", [every, some(4)])
def test_under_autocast(again: Callable[[Captured], Collection[str]]) -> None:
    torch.manual_seed(3)
    model, data = blocks(), regression(dtype=torch.float32)
    plain, selective = (trained(model, x, autocast="bfloat16", data=data) for x in (none, again))
    assert selective.losses == plain.losses
    assert all(torch.equal(t, selective.state[n]) for n, t in plain.state.items())


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes of tensors at once, above those at the beginning."""
    trace = torch.autograd.profiler.profile(profile_memory=True)
    with trace:
        run()
    result = trace.kineto_results
    assert result is not None
    now = most = 0
    for event in sorted(result.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()  # type: ignore[attr-defined]
            most = max(most, now)
    return most


def wide(count: int) -> Data:
    x, y = torch.randn(2, count, 4096, 6)
    return Data([Batch((a,), b) for a, b in zip(x, y, strict=True)])


class Layers(nn.Module):
    """Layers of which each saves what it gives: `count` times 4096 x 6 numbers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def but_every_fourth(captured: Captured) -> Collection[str]:
    tanhs = of_kind("Tanh", "tanh")(captured)
    assert len(tanhs) == 16
    return [node for node in captured.working if node not in tanhs[3::4]]


EACH = 4096 * 6 * 4


@pytest.mark.parametrize("minibatches", [1, 3])
def test_holds_less(minibatches: int) -> None:
    """All that the three minibatches in flight keep is every fourth output; what lies between two
    of them is made again at a time.
    """
    torch.manual_seed(3)
    model, data = Layers(16), wide(minibatches)
    ranks = [
        OneRank(copy.deepcopy(model), data, 1, halved=none_halved, again=again)
        for again in (none, but_every_fourth)
    ]
    plain, selective = (peak_bytes(rank.train) for rank in ranks)
    assert plain >= minibatches * 16 * EACH
    assert selective <= (minibatches * 4 + 4 + 5) * EACH


def test_nothing_is_left_by_itself() -> None:
    torch.manual_seed(3)
    rank = OneRank(Layers(16), wide(3), 1, halved=none_halved, again=but_every_fourth)
    left: list[weakref.ref[object]] = []

    def look(action: Action) -> None:
        if action.kind is Kind.FORWARD:
            runs = [x for x in gc.get_objects() if type(x).__name__ == "_RunAgain"]
            left.extend(map(weakref.ref, runs))

    rank.after = look
    gc.disable()
    try:
        rank.train()
    finally:
        gc.enable()
    assert left
    assert all(each() is None for each in left)
