"""Batch norms whose data devices divide compute what torch's do of the whole, statistics too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from divided import Executed, execute_divided, executed_by, held
from torch import Tensor, nn

from pipedream.capture.programs.batch_norms import DividedBatchNorm
from pipedream.capture.programs.description import execute
from pipedream.graph.placements.placement import Partial, Shard
from pipedream.sharding.rules import local_operator, strategies
from pipedream.sharding.rules.strategy import Strategy

NORMS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "rows": lambda: (nn.BatchNorm1d(3), (7, 3)),
    "sequences": lambda: (nn.BatchNorm1d(3, momentum=0.9), (7, 3, 5)),
    "pictures": lambda: (nn.BatchNorm2d(3), (5, 3, 4, 5)),
    "volumes": lambda: (nn.BatchNorm3d(3, eps=0.1), (5, 3, 2, 3, 4)),
    "not affine": lambda: (nn.BatchNorm2d(3, affine=False), (5, 3, 4, 5)),
    "without statistics": lambda: (nn.BatchNorm2d(3, track_running_stats=False), (5, 3, 4, 5)),
    "neither": lambda: (
        nn.BatchNorm2d(3, affine=False, track_running_stats=False),
        (5, 3, 4, 5),
    ),
    "averaged over all minibatches": lambda: (nn.BatchNorm2d(3, momentum=None), (5, 3, 4, 5)),
    "statistics that stay": lambda: (nn.BatchNorm2d(3, momentum=0.0), (5, 3, 4, 5)),
}


def passes(module: nn.Module, x: Tensor) -> list[Executed]:
    """The operators of both passes of its second minibatch, forward first."""
    module(torch.randn_like(x))
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor))
    result: Tensor = module(x)
    tangent = torch.randn_like(result)

    def run() -> None:
        module(x).backward(tangent)

    return [each for each in executed_by(run) if "batch_norm" in each.operator.family]


def in_parts(case: Executed, dim: int, devices: int) -> tuple[Strategy, list[list[Any]]]:
    """A strategy that divides the dimension, and of each device outputs and written inputs."""
    operator = case.operator
    strategy = next(
        each
        for each in strategies(operator, devices)
        if (each.inputs[0], each.within) == (Shard(dim), Partial())
    )
    locals_ = [local_operator(operator, strategy, devices, k) for k in range(devices)]
    parts = [held(x, its, devices) for x, its in zip(case.inputs, strategy.inputs, strict=True)]
    inputs = [[each[k].clone() for each in parts] for k in range(devices)]
    results = execute_divided(operator, locals_, (strategy,), (devices,), inputs)
    return strategy, [
        [*own, *(tensors[number] for number in operator.writes)]
        for own, tensors in zip(results, inputs, strict=True)
    ]


def check(case: Executed, dim: int, devices: int, tolerance: float) -> None:
    whole = [x.clone() for x in case.inputs]
    expected: Sequence[Any] = execute(case.operator, whole)
    expected = [*expected, *(whole[number] for number in case.operator.writes)]
    strategy, results = in_parts(case, dim, devices)
    written = [strategy.inputs[number] for number in case.operator.writes]
    for number, placement in enumerate((*strategy.outputs, *written)):
        parts = [each[number] for each in results]
        if expected[number] is None or parts[0] is None:
            assert parts == [None] * devices
            continue
        if isinstance(placement, Shard):
            parts = [torch.cat(parts, placement.dim)]
        for part in parts:
            assert part.dtype == expected[number].dtype
            size = expected[number].double().abs().max().clamp(min=1)
            difference = (part.double() - expected[number].double()).abs().max()
            assert difference <= tolerance * size, number


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", NORMS)
def test_all_kinds(name: str, devices: int) -> None:
    """Unevenly, along the batch, and along the places in a picture."""
    torch.manual_seed(0)
    module, shape = NORMS[name]()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    forward, backward = passes(module.double(), x)
    for dim in range(len(shape)):
        if dim != 1 and shape[dim] >= devices:
            check(forward, dim, devices, 1e-12)
            check(backward, dim, devices, 1e-12)


@pytest.mark.parametrize("affine", [True, False])
def test_single_precision(affine: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn((5, 3, 8, 8), requires_grad=True)
    for each in passes(nn.BatchNorm2d(3, affine=affine), x):
        check(each, 0, 2, 1e-6)


@pytest.mark.parametrize("lowered", [False, True])
def test_half_precision(lowered: bool) -> None:
    """Under autocast the data alone are in bfloat16, and statistics in single precision."""
    torch.manual_seed(0)
    module = nn.BatchNorm2d(3).to(torch.bfloat16 if lowered else torch.float32)
    x = torch.randn((5, 3, 8, 8), dtype=torch.bfloat16, requires_grad=True)
    for each in passes(module, x):
        check(each, 0, 2, 2**-7)
    forward, _ = passes(module, x)
    _, ((_, mean, deviation, *running), _) = in_parts(forward, 0, 2)
    statistics = torch.bfloat16 if lowered else torch.float32
    assert {each.dtype for each in (mean, deviation, *running)} == {statistics}


def test_statistics_in_single_precision_of_half_data() -> None:
    """They would differ by thousandths if sums were in bfloat16."""
    torch.manual_seed(0)
    x = torch.randn((5, 3, 8, 8), dtype=torch.bfloat16, requires_grad=True)
    forward, _ = passes(nn.BatchNorm2d(3), x)
    _, mean, deviation = execute(forward.operator, [x.clone() for x in forward.inputs])
    _, ((_, own_mean, own_deviation, *_), _) = in_parts(forward, 0, 2)
    torch.testing.assert_close(own_mean, mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own_deviation, deviation, rtol=1e-5, atol=1e-6)


def test_means_that_are_much_larger_than_deviations() -> None:
    """The difference of a mean of squares and a squared mean would have no digit left."""
    torch.manual_seed(0)
    x = (torch.randn((6, 3, 4, 4), dtype=torch.float64) + 1e8).requires_grad_()
    forward, _ = passes(nn.BatchNorm2d(3).double(), x)
    _, ((_, _, deviation, *_), _) = in_parts(forward, 0, 2)
    exact = (x.detach() - 1e8).var((0, 2, 3), correction=0).add(1e-5).rsqrt()
    torch.testing.assert_close(deviation, exact, rtol=1e-7, atol=0)


def test_in_evaluation_nothing_is_added_up() -> None:
    module = nn.BatchNorm2d(3).double().eval()
    x = torch.randn((5, 3, 4, 4), dtype=torch.float64, requires_grad=True)
    for case in executed_by(lambda: module(x).sum().backward()):
        ways = strategies(case.operator, 2)
        assert all(each.within != Partial() for each in ways)
        if "batch_norm" in case.operator.family:
            assert any(each.inputs[0] == Shard(0) for each in ways)


def test_a_device_may_have_one_value_of_a_channel() -> None:
    """Which torch refuses to normalize: a stage could not be built where a microbatch was divided
    by examples down to one each.
    """
    torch.manual_seed(0)
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    for case in passes(nn.BatchNorm1d(3).double(), x):
        check(case, 0, 7, 1e-12)
        strategy = next(
            each
            for each in strategies(case.operator, 7)
            if (each.inputs[0], each.within) == (Shard(0), Partial())
        )
        local = local_operator(case.operator, strategy, 7, 0)
        parts = [held(t, its, 7)[0] for t, its in zip(case.inputs, strategy.inputs, strict=True)]
        found = DividedBatchNorm(case.operator, local, lambda _, term: term).like(parts)
        for tensor, type_ in zip(found, local.outputs, strict=True):
            assert (tensor is None) == (type_ is None)
            assert tensor is None or type_ is None or tuple(tensor.shape) == type_.shape
