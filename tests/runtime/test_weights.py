"""A version in flight never changes, and memory is used again once nobody needs it."""

from __future__ import annotations

import torch
from torch import nn

from pipedream.runtime.weights import Weights


def one_weight(value: float, uses: dict[int, int]) -> tuple[Weights, torch.optim.Optimizer]:
    """With the minibatches that will run on each version."""
    parameter = nn.Parameter(torch.tensor([value]))
    weights = Weights({"w": parameter})
    weights.expect(uses)
    return weights, torch.optim.SGD([parameter], lr=1.0)


def step(weights: Weights, optimizer: torch.optim.Optimizer, gradient: float = 1.0) -> None:
    weights.gradients["w"] = torch.tensor([gradient])
    weights.update(optimizer, divisor=1)


def test_a_minibatch_in_flight_keeps_the_weights_it_began_with() -> None:
    weights, optimizer = one_weight(1.0, {0: 1})
    old = weights.acquire(0)
    loss = (old.tensors["w"] ** 2).sum()
    step(weights, optimizer, gradient=3.0)
    assert weights.current.tensors["w"].item() == -2.0
    assert old.tensors["w"].item() == 1.0
    (gradient,) = torch.autograd.grad(loss, [old.tensors["w"]])
    assert gradient.item() == 2.0, "the gradient is at the version of the forward pass"


def test_an_update_with_nothing_in_flight_stays_in_its_memory() -> None:
    weights, optimizer = one_weight(1.0, {0: 1})
    memory = weights.current.tensors["w"].data_ptr()
    weights.release(weights.acquire(0))
    step(weights, optimizer)
    assert weights.current.tensors["w"].data_ptr() == memory
    assert weights.peak_versions == 1


def test_the_memory_of_a_version_nobody_needs_is_used_again() -> None:
    weights, optimizer = one_weight(1.0, dict.fromkeys(range(21), 1))
    memories = set()
    in_flight = [weights.acquire(0)]
    for number in range(1, 21):
        step(weights, optimizer)
        memories.add(weights.current.tensors["w"].data_ptr())
        in_flight.append(weights.acquire(number))
        weights.release(in_flight.pop(0))
    assert len(memories) <= 2
    assert weights.peak_versions == 2
    assert weights.current.number == 20


def test_a_version_that_will_be_used_is_kept_though_it_is_not_the_newest() -> None:
    """2BW: all of round 1 runs on the version of round 0, which round 0 has replaced."""
    weights, optimizer = one_weight(1.0, {0: 2, 1: 1})
    weights.release(weights.acquire(0))
    step(weights, optimizer)
    old = weights.acquire(0)
    assert (old.tensors["w"].item(), weights.current.tensors["w"].item()) == (1.0, 0.0)
    weights.release(old)
    assert not weights.older
    assert weights.peak_versions == 2


def test_the_optimizer_remembers_across_versions() -> None:
    parameter = nn.Parameter(torch.tensor([0.0]))
    weights = Weights({"w": parameter})
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    weights.expect(dict.fromkeys(range(3), 1))
    for number in range(3):
        weights.acquire(number)
        step(weights, optimizer)
    assert weights.current.tensors["w"].item() == -(1 + 1.5 + 1.75)


def test_gradients_of_a_round_are_averaged() -> None:
    weights, optimizer = one_weight(0.0, {0: 2})
    for factor in (1.0, 5.0):
        version = weights.acquire(0)
        with weights.accumulating(version):
            (factor * version.tensors["w"]).sum().backward()
        weights.release(version)
        assert version.tensors["w"].grad is None
    weights.update(optimizer, divisor=4)
    assert weights.current.tensors["w"].item() == -1.5


def test_a_parameter_without_gradient_is_left_alone_as_torch_does() -> None:
    used, unused = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([1.0]))
    weights = Weights({"used": used, "unused": unused})
    optimizer = torch.optim.SGD([used, unused], lr=1.0, weight_decay=0.5)
    weights.gradients["used"] = torch.tensor([0.0])
    weights.update(optimizer, divisor=1)
    assert weights.current.tensors["used"].item() == 0.5
    assert weights.current.tensors["unused"].item() == 1.0
