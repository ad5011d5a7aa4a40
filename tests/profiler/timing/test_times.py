from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from pipedream.capture.captured import Captured, flatten_inputs
from pipedream.capture.export import capture
from pipedream.capture.segment import freeze_constants, segment
from pipedream.graph.profile import Quartiles
from pipedream.profiler.stretches.full_pass import _scaled_to_median, time_in_training
from pipedream.profiler.timing import per_node
from pipedream.profiler.timing.per_node import _NodeTimer, time_per_node
from pipedream.profiler.timing.stopping_rule import Repeats, StoppingRule
from pipedream.profiler.timing.times import Times, Timing

CPU = torch.device("cpu")
WAYS: dict[str, Callable[..., Times]] = {
    "in training": time_in_training,
    "one by one": time_per_node,
}

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


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Callable[..., Times]:
    return WAYS[request.param]


def timed(
    way: Callable[..., Times], model: nn.Module, *args: Any, warmup: int = 1, repeats: int = 1
) -> dict[str, Timing]:
    """Timings by description, of nodes whose descriptions differ."""
    captured = capture(model, args)
    times = way(captured, flatten_inputs(args, {}), StoppingRule(warmup, repeats), CPU)
    assert times.nodes.keys() == captured.graph.nodes.keys()
    return {captured.graph.nodes[node].description: timing for node, timing in times.nodes.items()}


@pytest.mark.slow
@pytest.mark.one_in(2)
def test_each_node_gets_its_own_time_forward_and_backward(way: Callable[..., Times]) -> None:
    timings = timed(way, Napping(), torch.ones(1, 3), repeats=9)
    asleep = timings.pop("Nap")
    assert FORWARD * 0.9 <= asleep.forward.median < BACKWARD * 0.9 <= asleep.backward.median
    for timing in timings.values():
        assert timing.forward.median < FORWARD / 2
        assert timing.backward.median < BACKWARD / 2


@pytest.mark.slow
def test_warm_up_and_repeats_run_each_node_once() -> None:
    calls.update(forward=0, backward=0)
    timed(time_per_node, Napping(), torch.ones(1, 3), warmup=2, repeats=3)
    assert calls == {"forward": 5, "backward": 5}


def test_what_falls_on_another_node_in_each_pass_is_shared_out_over_all() -> None:
    """The median of every node is 1 s, of the pass 3.5 s: a sum of medians left it out."""
    passes = [{name: 1.0 + 0.5 * (name == slow) for name in "abc"} for slow in "abc"]
    evened = _scaled_to_median(passes)
    medians = [statistics.median(seconds[name] for seconds in evened) for name in "abc"]
    assert medians == pytest.approx([3.5 / 3] * 3)


def test_a_pass_that_is_slow_throughout_says_nothing_of_a_node() -> None:
    """Fast or slow, b takes twice the time of a, and the quartiles of both are their medians."""
    fast, slow = {"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 4.0}
    passes = [fast, slow, fast, slow, slow]
    assert _scaled_to_median(passes) == [pytest.approx(slow)] * 5


def test_nodes_that_take_no_time_stay_so() -> None:
    assert _scaled_to_median([{"a": 0.0}, {"a": 0.0}]) == [{"a": 0.0}, {"a": 0.0}]


@pytest.mark.slow
def test_in_training_stretches_and_some_forward_passes_again_are_timed_with_the_whole() -> None:
    calls.update(forward=0, backward=0)
    captured = capture(Napping(), (torch.ones(1, 3),))
    times = time_in_training(captured, [torch.ones(1, 3)], StoppingRule(2, 4), CPU)
    assert calls == {"forward": 2 + 2 * 4 + 2, "backward": 2 + 2 * 4}
    assert (times.warmup, times.repeats) == (2, 4)
    ends = [(each.first, each.last) for each in times.stretches]
    assert ends[-1] == ("node2", "node4"), "the last is the whole model"
    asleep = next(t for n, t in times.nodes.items() if captured.graph.nodes[n].description == "Nap")
    assert asleep.recomputed is not None
    assert times.forward is not None
    # As forward: on a machine with other work to do the stretches may say a tenth less of both.
    assert asleep.recomputed.median >= FORWARD * 0.9 * min(1.0, times.forward.factor)


@pytest.mark.slow
def test_the_nodes_add_up_to_stretches_but_for_the_factor_of_the_fit() -> None:
    captured = capture(Napping(), (torch.ones(1, 3),))
    times = time_in_training(captured, [torch.ones(1, 3)], StoppingRule(1, 1), CPU)
    nodes, both = times.nodes.values(), times.stretches
    assert sum(each.nodes for each in both) == 3, "one repeat: in two stretches"
    assert times.forward is not None
    assert times.backward is not None
    forward = times.forward.factor * sum(each.forward.summed for each in both)
    backward = times.backward.factor * sum(each.backward.summed for each in both)
    assert sum(timing.forward.median for timing in nodes) == pytest.approx(forward)
    assert sum(timing.backward.median for timing in nodes) == pytest.approx(backward)
    assert sum(each.forward.measured for each in both) >= FORWARD
    assert sum(each.backward.measured for each in both) >= BACKWARD


class Branches(nn.Module):
    """Two layers beside each other, of which the first is slow; one that hands on what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        slow, fast = nap(y), y.cos()
        return slow.contiguous() * fast


@pytest.mark.slow
def test_branches_and_what_hands_on_what_it_gets_are_kept_apart() -> None:
    """In parts of all: nodes are scaled to passes in one piece, which a busy machine disturbs."""
    timings = timed(time_in_training, Branches(), torch.ones(4), repeats=9)
    asleep = timings["Nap"]
    assert asleep.forward.median >= 0.9 * sum(t.forward.median for t in timings.values())
    assert asleep.backward.median >= 0.9 * sum(t.backward.median for t in timings.values())


@pytest.mark.slow
def test_a_loss_is_timed_by_itself() -> None:
    captured = capture(nn.Linear(3, 2), (torch.ones(1, 3),))
    times = time_in_training(
        captured,
        [torch.ones(1, 3)],
        StoppingRule(1, 3),
        CPU,
        lambda values: nap(values[captured.outputs[0]]).sum(),
    )
    assert times.loss is not None
    assert times.loss.forward.median >= FORWARD * 0.9
    assert times.loss.backward.median >= BACKWARD * 0.9
    assert all(t.forward.median < FORWARD / 2 for t in times.nodes.values())
    assert all(t.backward.median < BACKWARD / 2 for t in times.nodes.values())


@pytest.mark.slow
@pytest.mark.one_in(2)
def test_warm_up_does_not_count(way: Callable[..., Times]) -> None:
    naps[:] = [0.3, 0.3, 0.001]
    assert timed(way, Napping(), torch.ones(1, 3), warmup=2)["Nap"].forward.median < 0.3
    naps.clear()


def test_warm_up_lasts_until_passes_get_no_faster() -> None:
    repeats = Repeats(StoppingRule())
    assert [repeats.warm(seconds) for seconds in (0.9, 0.5, 0.4, 0.399)] == [
        True,
        True,
        True,
        False,
    ]
    slow = Repeats(StoppingRule())
    assert [slow.warm(seconds) for seconds in (9.0, 5.0)] == [True, False], "not for minutes"


def test_repeats_last_until_the_median_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def count(seconds: Callable[[int], float], stopping_rule: StoppingRule) -> int:
        repeats = Repeats(stopping_rule)
        for number in range(1, 1000):
            now[0] += seconds(number)
            if not repeats.go_on(seconds(number)):
                return number
        raise AssertionError

    assert count(lambda _: 3.0, StoppingRule()) == 4, "all alike: no fewer than four"
    assert count(lambda _: 0.125, StoppingRule()) == 64, "short ones for eight seconds"
    assert count(lambda n: 1.0 + n % 2, StoppingRule(seconds=20)) == 13, "never known: for its time"
    assert count(lambda n: 2.0 + 0.02 * (n % 2), StoppingRule(seconds=60)) == 4
    assert count(lambda n: 0.001 * n, StoppingRule(repeats=7)) == 7


def test_spread_is_median_and_quartiles() -> None:
    assert Quartiles.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Quartiles(median=3.0, lower=2.0, upper=4.0)
    assert Quartiles.of([7.0]) == Quartiles(median=7.0, lower=7.0, upper=7.0)
    assert Quartiles.of([1.0, 2.0]) == Quartiles(median=1.5, lower=1.25, upper=1.75)


@pytest.mark.one_in(2)
def test_inputs_take_no_time_and_a_node_without_gradient_no_backward(
    way: Callable[..., Times],
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    # The backward pass is a difference: of one repeat that was disturbed it can come out as 0.
    timings = timed(way, model, torch.ones(2, 3), repeats=15)
    none = Quartiles(median=0.0, lower=0.0, upper=0.0)
    assert timings["Input0"].forward == timings["Input0"].backward == none
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


@pytest.mark.one_in(2)
def test_whole_numbers_are_the_models_own(way: Callable[..., Times]) -> None:
    timings = timed(way, Lookup(), torch.tensor([[0, 1, 2, 2]]))
    assert timings["Embedding(4, 2)"].backward.median > 0


@pytest.mark.slow
@pytest.mark.one_in(2)
def test_buffers_and_gradients_are_left_as_they_were(way: Callable[..., Times]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Flatten())
    images = torch.randn(4, 1, 5, 5)
    model(images)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    captured = capture(model, (images,))
    way(captured, [images], StoppingRule(1, 4), CPU)
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


@pytest.mark.one_in(2)
def test_buffers_are_left_as_they_were_also_when_a_node_fails(way: Callable[..., Times]) -> None:
    model = Halting()
    captured = capture(model, (torch.ones(4, 3), torch.tensor([1])))
    with pytest.raises(IndexError):
        way(captured, [torch.ones(4, 3), torch.tensor([5])], StoppingRule(1, 1), CPU)
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


@pytest.mark.slow
@pytest.mark.one_in(2)
def test_layers_of_several_outputs_and_shared_weights(way: Callable[..., Times]) -> None:
    timings = timed(way, Several(), torch.ones(5, 2, 3), torch.ones(2))
    assert timings["LSTM(3, 4)"].backward.median > 0


@pytest.mark.slow
@pytest.mark.one_in(2)
def test_progress_tells_how_far(way: Callable[..., Times]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    seen: list[float] = []
    captured = capture(model, (torch.ones(1, 3),))
    way(captured, [torch.ones(1, 3)], StoppingRule(1, 4), CPU, progress=seen.append)
    assert seen == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.thorough
def test_values_are_freed_when_the_last_reader_is_done() -> None:
    """A chain of 8 layers holds two values at a time, not eight."""
    model = nn.Sequential(*(nn.ReLU() for _ in range(8)))
    x = torch.ones(1000, 1000)
    timer = _NodeTimer(capture(model, (x,)), [x], torch.device("cpu"))
    alive: list[int] = []
    step = per_node.step

    def counting(*args: Any) -> Any:
        tensors = (item for item in gc.get_objects() if type(item) is Tensor)
        alive.append(sum(value.numel() == x.numel() for value in tensors))
        return step(*args)

    with patch.object(per_node, "step", counting):
        timer.run()
    assert max(alive) <= alive[0] + 1


class Masked(nn.Module):
    """Two layers that read one mask, made of nothing but its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(4).float().cumsum(0).exp()
        return self.one(x * mask) * mask  # type: ignore[no-any-return]


def modules_agree(captured: Captured, inputs: list[Tensor]) -> None:
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
    modules_agree(captured, [x])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_and_back(way: Callable[..., Times]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    x = torch.randn(4, 1, 5, 5)
    captured = capture(model, (x,))
    times = way(captured, [x], StoppingRule(1, 3), torch.device("cuda"))
    assert sum(timing.backward.median for timing in times.nodes.values()) > 0
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}
