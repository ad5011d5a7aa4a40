"""Times of a GPU that lags behind the host, as marks in its stream give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_gpu import CUDA, FakeGpu
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream.capture.export import capture
from pipedream.profiler.timing import backward_split, per_node, training_overheads
from pipedream.profiler.timing.passes import Stretch, Turn
from pipedream.profiler.timing.per_node import time_per_node_fake
from pipedream.profiler.timing.stopping_rule import StoppingRule
from pipedream.profiler.timing.stopwatch import CudaStopwatch

HANDED_OVER = 50e-6
SMALL = 10e-6
LARGE = 2e-3
MULTIPLICATIONS = {torch.ops.aten.addmm.default, torch.ops.aten.mm.default}
CPU = torch.device("cpu")


class Watch(CudaStopwatch):
    """Of a model that is on the CPU in truth."""

    def __init__(self) -> None:
        self.device = CUDA
        self.other = torch.empty(1)


class OnGpu(TorchDispatchMode):
    """Every operator takes the host as long, and then, but for views, the GPU what it takes."""

    def __init__(self, gpu: FakeGpu, large: float) -> None:
        super().__init__()
        self.gpu, self.large = gpu, large

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gpu.call(HANDED_OVER)
        aliases = [returned.alias_info for returned in func._schema.returns]
        if all(alias is None or alias.is_write for alias in aliases):
            self.gpu.launch(self.large if func in MULTIPLICATIONS else SMALL)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    fake.stand_in(monkeypatch)
    for module in (per_node, backward_split, training_overheads):
        monkeypatch.setattr(module, "stopwatch", lambda device: Watch())
    return fake


def model() -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())


def turn(gpu: FakeGpu, large: float) -> Turn:
    captured = capture(model(), (torch.randn(2, 4),))
    stretch = Stretch(captured, captured.working, Watch(), CPU, marked=True)
    values = captured.on_device([torch.randn(2, 4)], CPU)
    with OnGpu(gpu, large):
        return stretch.run(values)


def test_small_nodes_among_large_ones_take_what_they_take_the_gpu(gpu: FakeGpu) -> None:
    """The first of them, too, which the host of an idle GPU would be late with."""
    forward = turn(gpu, LARGE).forward
    expected = [SMALL, LARGE, SMALL, LARGE, SMALL]
    assert list(forward.nodes.values()) == pytest.approx(expected, abs=5e-6)
    assert forward.call < 5e-6


def test_a_model_of_small_nodes_takes_what_handing_it_over_takes(gpu: FakeGpu) -> None:
    """So it does in training: the GPU waits for its host."""
    assert turn(gpu, SMALL).forward.seconds > 5 * HANDED_OVER


def test_nodes_alone_take_what_they_take_the_gpu(gpu: FakeGpu) -> None:
    captured = capture(model(), (torch.randn(2, 4),))
    with OnGpu(gpu, LARGE):
        times = time_per_node_fake(captured, [torch.randn(2, 4)], StoppingRule(1, 3), CPU)
    forward = [times.nodes[name].forward.median for name in captured.working]
    assert forward == pytest.approx([SMALL, LARGE, SMALL, LARGE, SMALL], abs=5e-6)


def test_halves_of_a_backward_pass_divide_as_on_the_gpu(gpu: FakeGpu) -> None:
    """Of a linear layer: one multiplication for its input, one and the bias for its weights."""
    captured = capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(2, 4),))
    with OnGpu(gpu, 4 * SMALL):
        splits = backward_split.backward_splits(
            captured, [torch.randn(2, 4)], StoppingRule(1, 3), CPU
        )
    last = splits[captured.working[-1]].input_share
    assert last == pytest.approx(4 / (4 + 4 + 1), abs=0.03)


def test_an_update_takes_what_it_takes_the_gpu(gpu: FakeGpu) -> None:
    """Of four tensors: a mean and a copy of each, and a few kernels for the step."""
    captured = capture(model(), (torch.randn(2, 4),))
    with OnGpu(gpu, LARGE):
        cost = training_overheads.updates(captured, CPU)["sgd"]
    assert 9 * SMALL <= 160 / cost.bytes_per_second < 12 * SMALL


def test_marks_are_read_in_their_order(gpu: FakeGpu) -> None:
    watch = Watch()
    first = watch.mark()
    gpu.launch(SMALL)
    second = watch.mark()
    assert watch.seconds(first, second) == pytest.approx(SMALL, abs=2e-6)
    with pytest.raises(AssertionError, match="order"):
        watch.seconds(second, first)


def test_the_cache_is_cleared_before_what_is_timed(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {}

    def empty(size: int, **options: object) -> Tensor:
        held["bytes"] = size
        return torch.ones(8)

    monkeypatch.setattr("pipedream.profiler.timing.stopwatch.torch.empty", empty)
    watch = CudaStopwatch(CUDA)
    watch.clear()
    assert not watch.other.any()
    assert held["bytes"] == 2 << 10
