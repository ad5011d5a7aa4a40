"""What training takes beside the passes: updates, and reading a minibatch of the data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from pipedream.capture.export import capture
from pipedream.capture.sources.load import Loaded
from pipedream.profiler.timing import muon_steps, training_overheads
from pipedream.profiler.timing.muon_steps import matrix_seconds, newton_schulz_flops
from pipedream.profiler.timing.training_overheads import (
    OPTIMIZERS,
    gradient_sum_rate,
    reading_seconds,
    updates,
)

CPU = torch.device("cpu")


def test_what_an_optimizer_keeps_for_each_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1].weight.requires_grad_(False)
    found = updates(capture(model, (torch.ones(1, 3),)), CPU)
    assert found.keys() == {*OPTIMIZERS, "muon"}
    weight, bias = 4 * 12, 4 * 2
    for kind, times in {"sgd": 0, "momentum": 1, "adam": 2}.items():
        state = found[kind].state
        assert (state["0.weight"], state["1.bias"]) == (times * weight, times * bias)
        assert "1.weight" not in state
        assert found[kind].bytes_per_second > 0


def test_muon_keeps_and_takes_what_a_parameter_has_it_for() -> None:
    """The hidden layer's weight, of which there are two alike, by Muon; the rest as AdamW."""
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 50))
    found = updates(capture(model, (torch.zeros(2, dtype=torch.int64),)), CPU)
    cost, adam = found["muon"], found["adam"]
    hidden, sizes = ("1.weight", "2.weight"), {n: p.nbytes for n, p in model.named_parameters()}
    times = {name: 1 if name in hidden else 2 for name in sizes}
    assert cost.state == {name: times[name] * size for name, size in sizes.items()}
    assert cost.seconds is not None
    assert cost.seconds["1.weight"] == cost.seconds["2.weight"] > sizes["1.weight"] * 1e-12
    for name in sizes.keys() - hidden:
        assert cost.seconds[name] == pytest.approx(sizes[name] / adam.bytes_per_second)
    whole = sum(sizes.values()) / sum(cost.seconds.values())
    assert cost.bytes_per_second == pytest.approx(whole)
    kernels = capture(nn.Sequential(nn.Conv1d(1, 2, 3)), (torch.ones(1, 1, 5),))
    assert updates(kernels, CPU).keys() == OPTIMIZERS.keys()


def test_a_large_matrix_is_timed_smaller() -> None:
    """Its time grows with its flops: 5 (4 m^2 n + 2 m^3) of m x n."""
    assert newton_schulz_flops((6, 3)) == 5 * (2 * 3 * 3 * 6 + 2 * 3**3 + 2 * 3 * 6 * 3)
    small, large = torch.zeros(16, 32), torch.zeros(64, 128)
    most = patch.object(muon_steps, "_MOST_FLOPS", newton_schulz_flops(small.shape))
    with most, patch.object(muon_steps, "_seconds", return_value=2.0) as timed:
        found = matrix_seconds({"small": small, "large": large, "same": small}, CPU)
    assert found == {"small": 2.0, "large": pytest.approx(2.0 * 64), "same": 2.0}
    assert {call.args[1].shape for call in timed.call_args_list} == {small.shape}


def test_weights_and_gradients_are_left_as_they_were() -> None:
    model = nn.Linear(3, 4)
    before = model.weight.detach().clone()
    updates(capture(model, (torch.ones(1, 3),)), CPU)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_with_nothing_to_learn_there_are_none() -> None:
    nothing = capture(nn.ReLU(), (torch.ones(1, 3),))
    assert updates(nothing, CPU) == {}
    assert gradient_sum_rate(nothing, CPU) is None


def test_the_copy_of_old_weights_reads_memory_that_was_written() -> None:
    """Fresh memory is one page of zeros, which a cache holds: an update of resnet18 was said to
    take 16 ms, and took 20 in a run.
    """
    with patch.object(training_overheads, "_seconds", return_value=(1e-3, 1e-3)) as timed:
        updates(capture(nn.Linear(1024, 1024), (torch.ones(1, 1024),)), CPU)
    for call in timed.call_args_list:
        _, parameters, spare, _ = call.args
        assert [one.shape for one in spare] == [one.shape for one in parameters]
        assert all(one.count_nonzero() == one.numel() for one in spare)


def test_a_step_in_place_takes_no_time_of_the_copy() -> None:
    """Of six seconds between four marks, two are those of the copy."""
    watch = Mock()
    watch.mark.side_effect = (0.0, 1.0, 3.0, 6.0)
    watch.seconds.side_effect = lambda start, end: end - start
    parameter = torch.zeros(3, requires_grad=True)
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], 1.0)
    taken = training_overheads._seconds(optimizer, [parameter], [torch.full((3,), 5.0)], watch)
    assert taken == (6.0, 4.0)
    assert parameter.tolist() == [4.5] * 3  # the copy, less half of the gradient
    found = updates(capture(nn.Linear(2048, 1024), (torch.ones(1, 2048),)), CPU)
    for kind in OPTIMIZERS:
        in_place = found[kind].in_place_bytes_per_second
        assert in_place is not None
        assert in_place > found[kind].bytes_per_second


def with_data(asked: list[Sequence[int]], seconds: float) -> Loaded:
    def read(indices: Sequence[int]) -> None:
        asked.append(indices)
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    return Loaded(nn.Identity(), (), read=read, examples=50)


def test_what_the_processor_does_counts() -> None:
    asked: list[Sequence[int]] = []
    found = reading_seconds(with_data(asked, 0.01), 4, CPU)
    assert found is not None
    assert found >= 0.01
    assert 3 <= len(asked) <= 20
    assert all(len(set(indices)) == 4 and max(indices) < 50 for indices in asked)
    assert max(max(indices) for indices in asked) >= 4, "from all over the data"


@pytest.mark.slow
def test_reading_that_waits_takes_nothing_from_the_passes() -> None:
    loaded = Loaded(nn.Identity(), (), read=lambda indices: time.sleep(0.05), examples=50)
    found = reading_seconds(loaded, 4, CPU)
    assert found is not None
    assert found < 0.01


def test_nothing_where_there_are_no_data_or_another_device_does_the_passes() -> None:
    assert reading_seconds(Loaded(nn.Identity(), ()), 4, CPU) is None
    assert reading_seconds(with_data([], 0.01), 4, torch.device("cuda")) is None


class Millisecond:
    """A watch by which everything takes that long."""

    def clear(self) -> None: ...

    def lead(self) -> None: ...

    def mark(self) -> None: ...

    def seconds(self, start: None, end: None) -> float:
        return 1e-3


def test_how_fast_gradients_are_added() -> None:
    """All of them, one after the other."""
    learned = capture(nn.Linear(20, 10), (torch.ones(1, 20),))
    with patch.object(training_overheads, "stopwatch", lambda device: Millisecond()):
        rate = gradient_sum_rate(learned, CPU)
    assert rate == pytest.approx(4 * (200 + 10) / 2e-3)
