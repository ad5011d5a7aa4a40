"""A version in flight never changes, and memory is used again once nobody needs it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipedream.runtime.optim.prediction import Prediction
from pipedream.runtime.optim.weights import Weights


def one_weight(value: float, uses: dict[int, int]) -> tuple[Weights, torch.optim.Optimizer]:
    """With the minibatches that will run on each version."""
    parameter = nn.Parameter(torch.tensor([value]))
    weights = Weights({"w": parameter})
    weights.expect(uses)
    return weights, torch.optim.SGD([parameter], lr=1.0)


def step(weights: Weights, optimizer: torch.optim.Optimizer, gradient: float = 1.0) -> None:
    weights.gradients["w"] = torch.tensor([gradient])
    weights.update(weights.take_gradients(1), optimizer.step, weights.current.number + 1)


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
    weights.update(weights.take_gradients(4), optimizer.step, weights.current.number + 1)
    assert weights.current.tensors["w"].item() == -1.5


def test_a_parameter_without_gradient_is_left_alone_as_torch_does() -> None:
    used, unused = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([1.0]))
    weights = Weights({"used": used, "unused": unused})
    optimizer = torch.optim.SGD([used, unused], lr=1.0, weight_decay=0.5)
    weights.gradients["used"] = torch.tensor([0.0])
    weights.update(weights.take_gradients(1), optimizer.step, weights.current.number + 1)
    assert weights.current.tensors["used"].item() == 0.5
    assert weights.current.tensors["unused"].item() == 1.0


def predicted(optimizer: type[torch.optim.Optimizer], **args: object) -> tuple[Tensor, Tensor]:
    """Three steps by gradients 1, 2, 4; then the weight three updates ahead, and where it is."""
    parameter = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    made = optimizer([parameter], lr=0.1, **args)
    weights = Weights({"w": parameter}, prediction=Prediction(made, {"w": parameter}))
    for gradient in (1.0, 2.0, 4.0):
        weights.gradients["w"] = torch.tensor([gradient], dtype=torch.float64)
        weights.update(weights.take_gradients(1), made.step, weights.current.number + 1)
    version = weights.acquire(3, ahead=3)
    result = version.tensors["w"].detach().clone()
    weights.release(version)
    assert weights.spare, "its memory is used again"
    return result, parameter.detach()


def test_a_prediction_repeats_the_step_of_sgd_with_momentum() -> None:
    """SpecTrain: w - s lr v, v the momentum: ((1 * 0.5) + 2) * 0.5 + 4 = 5.25."""
    ahead, now = predicted(torch.optim.SGD, momentum=0.5)
    assert ahead.item() == pytest.approx(now.item() - 3 * 0.1 * 5.25, abs=1e-12)


def test_a_prediction_repeats_the_step_of_adam() -> None:
    """PipeOptim: w - s lr m / (sqrt(v) + eps), both with their bias taken out."""
    ahead, now = predicted(torch.optim.Adam, betas=(0.5, 0.5))
    m, v = (0.125 * 1 + 0.25 * 2 + 0.5 * 4) / 0.875, (0.125 * 1 + 0.25 * 4 + 0.5 * 16) / 0.875
    assert ahead.item() == pytest.approx(now.item() - 3 * 0.1 * m / (v**0.5 + 1e-8), abs=1e-12)


def test_before_the_first_update_nothing_is_predicted() -> None:
    parameter = nn.Parameter(torch.tensor([1.0]))
    prediction = Prediction(torch.optim.Adam([parameter]), {"w": parameter})
    weights = Weights({"w": parameter}, prediction=prediction)
    assert weights.acquire(0, ahead=2).tensors["w"].item() == 1.0


def test_a_new_version_is_copied_at_once_and_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor was a kernel of its own."""
    calls = []
    copy = torch._foreach_copy_

    def counted(targets: list[Tensor], sources: list[Tensor]) -> None:
        calls.append(len(targets))
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.complex64]
    parameters = {
        f"p{n}": nn.Parameter(torch.randn(3, 5, dtype=t).t()) for n, t in enumerate(dtypes)
    }
    weights = Weights(parameters)
    weights.expect({0: 1})
    old = weights.acquire(0)
    memory = {name: tensor.data_ptr() for name, tensor in old.tensors.items()}
    weights.update({}, lambda: None, 1)
    assert calls == [2, 1, 1]
    for name, tensor in weights.current.tensors.items():
        assert torch.equal(tensor, old.tensors[name])
        assert tensor.stride() == old.tensors[name].stride()
        assert tensor.data_ptr() != memory[name] == old.tensors[name].data_ptr()
