from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipedream.profiler.capture import Captured, capture, flatten_inputs
from pipedream.profiler.freeze import freeze_constants
from pipedream.profiler.segment import segment
from pipedream.profiler.timing import Spread, Timing, _Walk, time_nodes

FORWARD, BACKWARD = 0.02, 0.05
calls = {"forward": 0, "backward": 0}
naps: list[float] = []  # what the next forward passes take instead


@torch.library.custom_op("pipedream_tests::nap", mutates_args=())
def nap(x: Tensor) -> Tensor:
    """A copy that takes FORWARD seconds, its gradient BACKWARD seconds."""
    calls["forward"] += 1
    time.sleep(naps.pop(0) if naps else FORWARD)
    return x.clone()


@torch.library.custom_op("pipedream_tests::nap_backward", mutates_args=())
def nap_backward(gradient: Tensor) -> Tensor:
    calls["backward"] += 1
    time.sleep(BACKWARD)
    return gradient.clone()


nap.register_fake(torch.empty_like)
nap_backward.register_fake(torch.empty_like)
nap.register_autograd(lambda context, gradient: nap_backward(gradient))


class Napping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nap(self.first(x)))  # type: ignore[no-any-return]


def timed(model: nn.Module, *args: Any, warmup: int = 0, repeats: int = 1) -> dict[str, Timing]:
    """Timings by description, of nodes whose descriptions differ."""
    captured = capture(model, args)
    timings = time_nodes(captured, flatten_inputs(args, {}), warmup, repeats, torch.device("cpu"))
    assert timings.keys() == captured.graph.nodes.keys()
    return {captured.graph.nodes[node].description: timing for node, timing in timings.items()}


def test_each_node_gets_its_own_time_forward_and_backward() -> None:
    timings = timed(Napping(), torch.ones(1, 3), repeats=3)
    asleep = timings.pop("Nap")
    assert FORWARD <= asleep.forward.median < BACKWARD <= asleep.backward.median
    for timing in timings.values():
        assert timing.forward.median < FORWARD
        assert timing.backward.median < BACKWARD


def test_every_repeat_and_warm_up_runs_each_node_once() -> None:
    calls.update(forward=0, backward=0)
    timed(Napping(), torch.ones(1, 3), warmup=2, repeats=3)
    assert calls == {"forward": 5, "backward": 5}


def test_warm_up_does_not_count() -> None:
    naps[:] = [0.3, 0.3, 0.001]
    assert timed(Napping(), torch.ones(1, 3), warmup=2)["Nap"].forward.median < 0.3


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(median=3.0, lower=2.0, upper=4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread.of([1.0, 2.0]) == Spread(1.5, 1.25, 1.75)


def test_inputs_take_no_time_and_a_node_without_gradient_no_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    # The backward pass is a difference: of one repeat that was disturbed it can come out as 0.
    timings = timed(model, torch.ones(2, 3), repeats=15)
    none = Spread(0.0, 0.0, 0.0)
    assert timings["Input0"] == Timing(none, none)
    frozen = timings["Linear(in_features=3, out_features=4, bias=True)"]
    assert frozen.forward.median > 0
    assert frozen.backward == none
    assert timings["ReLU()"].backward == none
    assert timings["Linear(in_features=4, out_features=2, bias=True)"].backward.median > 0


class Lookup(nn.Module):
    """Looks up what it has computed: any whole numbers but the real ones are out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 4)
        self.rank = nn.Embedding(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.words(tokens)
        return self.rank(words.argmax(-1)) + words.sum(-1, keepdim=True)  # type: ignore[no-any-return]


def test_whole_numbers_are_the_models_own() -> None:
    timings = timed(Lookup(), torch.tensor([[0, 1, 2, 2]]))
    assert timings["Embedding(4, 2)"].backward.median > 0


def test_buffers_and_gradients_are_left_as_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Flatten())
    images = torch.randn(4, 1, 5, 5)
    model(images)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    captured = capture(model, (images,))
    time_nodes(captured, [images], 1, 2, torch.device("cpu"))
    for holder in (model, captured.module):
        held = holder.state_dict()
        for name, value in before.items():
            torch.testing.assert_close(held[name], value, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


class Halting(nn.Module):
    """Counts a batch, then looks up what may not be there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.words = nn.Embedding(2, 3)

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        return self.norm(x) + self.words(word)  # type: ignore[no-any-return]


def test_buffers_are_left_as_they_were_also_when_a_node_fails() -> None:
    model = Halting()
    captured = capture(model, (torch.ones(4, 3), torch.tensor([1])))
    with pytest.raises(IndexError):
        time_nodes(captured, [torch.ones(4, 3), torch.tensor([5])], 0, 1, torch.device("cpu"))
    assert model.norm.state_dict()["num_batches_tracked"].item() == 0
    assert gc.isenabled()


class Several(nn.Module):
    """A layer of three outputs, one unused; a weight used twice; an input handed through."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(3, 4)
        self.dense = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        out, (hidden, _) = self.recurrent(x)
        return {"twice": self.dense(self.dense(out)), "pair": (hidden, y)}


def test_layers_of_several_outputs_and_shared_weights() -> None:
    timings = timed(Several(), torch.ones(5, 2, 3), torch.ones(2))
    assert timings["LSTM(3, 4)"].backward.median > 0


def test_progress_tells_how_far_and_of_what() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    seen: list[tuple[int, int]] = []
    captured = capture(model, (torch.ones(1, 3),))
    time_nodes(
        captured,
        [torch.ones(1, 3)],
        1,
        2,
        torch.device("cpu"),
        lambda done, total: seen.append((done, total)),
    )
    assert seen == [(done, 6) for done in range(1, 7)]


def test_values_are_freed_when_the_last_reader_is_done() -> None:
    """A chain of 8 layers holds two values at a time, not eight."""
    model = nn.Sequential(*(nn.ReLU() for _ in range(8)))
    x = torch.ones(1000, 1000)
    walk = _Walk(capture(model, (x,)), [x], torch.device("cpu"))
    alive: list[int] = []

    def count() -> None:
        tensors = (item for item in gc.get_objects() if type(item) is Tensor)
        alive.append(sum(value.numel() == x.numel() for value in tensors))

    walk.run(count)
    assert max(alive) <= alive[0] + 1


class Masked(nn.Module):
    """Two layers that read one mask, made of nothing but its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(4).float().cumsum(0).exp()
        return self.one(x * mask) * mask  # type: ignore[no-any-return]


def pieces_agree(captured: Captured, inputs: list[Tensor]) -> None:
    whole = segment(captured, list(captured.graph.nodes), keep=captured.outputs)
    expected = whole.module(*inputs)
    frozen = freeze_constants(whole, captured.owner)
    assert not [
        node
        for node in frozen.module.graph.nodes
        if node.op == "call_function" and node.name not in captured.owner
    ]
    torch.testing.assert_close(frozen.module(*inputs), expected)


def test_constants_are_made_once_and_give_the_same_values() -> None:
    x = torch.randn(2, 4)
    captured = capture(Masked(), (x,))
    assert any(node.name not in captured.owner for node in captured.module.graph.nodes)
    pieces_agree(captured, [x])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_and_back() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    x = torch.randn(4, 1, 5, 5)
    captured = capture(model, (x,))
    timings = time_nodes(captured, [x], 1, 3, torch.device("cuda"))
    assert sum(timing.backward.median for timing in timings.values()) > 0
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}
