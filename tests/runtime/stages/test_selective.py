"""Stages of which some nodes are recomputed learn what others learn, bit for bit, and hold less."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Collection

import pytest
import torch
from one_rank import OneRank, none_halved, regression
from saving_models import EACH, Convolutions, Layers, Shared, blocks, wide
from torch import nn

from pipedream.capture.captured import Captured
from pipedream.graph.errors import UserError
from pipedream.schedule.action import Action, Kind


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


@pytest.mark.one_in(5)
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


def but_every_fourth(captured: Captured) -> Collection[str]:
    tanhs = of_kind("Tanh", "tanh")(captured)
    assert len(tanhs) == 16
    return [node for node in captured.working if node not in tanhs[3::4]]


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


def test_a_compiled_stage_is_refused() -> None:
    with pytest.raises(UserError, match=r"does not go with torch\.compile"):
        OneRank(blocks(), regression(), 1, halved=none_halved, again=every, backend="eager")
