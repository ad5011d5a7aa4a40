"""The norm of the gradients: where it is added up, and what is clipped by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import chain_config

from pipedream.graph.run_config import OptimizerConfig
from pipedream.runtime.optim.optimizers import make_optimizer
from pipedream.runtime.optim.rates import LearningRate, LossSum
from pipedream.runtime.optim.stepping import StageStepping, Stepping
from pipedream.runtime.optim.weights import Weights


class Asked(Exception):
    """The norm is to be added up over the ranks."""


def test_a_stage_without_parameters_adds_its_norm_up_on_its_own_device() -> None:
    """It did so on the CPU, which NCCL does not take."""

    def add_up(tensor: Tensor) -> None:
        assert tensor.device.type == "meta"
        assert tensor.dtype == torch.float64
        raise Asked

    given = OptimizerConfig(name="SGD", args={"lr": 0.1})
    config = chain_config(given).model_copy(update={"clip_norm": 1.0})
    optimizer = make_optimizer(given, {})
    losses = LossSum(add_up, torch.device("meta"))
    steps = StageStepping(optimizer, {}, config, LearningRate(None, optimizer, Path()), ())
    with pytest.raises(Asked):
        Stepping({0: steps}, config, losses, add_up).agree(0, Weights({}), 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("most", [1.7, 1e3])
def test_gradients_are_clipped_as_by_a_look_at_the_norm(dtype: torch.dtype, most: float) -> None:
    """Bit for bit, though the norm stays where it is: a look waits for a GPU."""
    parameter = nn.Parameter(torch.zeros(1001, dtype=dtype))
    gradient = torch.randn(1001, dtype=dtype)
    kept = gradient.clone()
    stepping(parameter, clip_norm=most).update(0, 1, weights_with(parameter, gradient), 1, 1)
    norm = torch.linalg.vector_norm(kept).double().item()
    if norm > most:
        torch._foreach_mul_([kept], most / (norm + 1e-6))
    assert torch.equal(parameter.detach(), -kept)


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"clip_norm": 1.0, "nan": "skip"}, True),
        ({"nan": "skip"}, True),
        ({"clip_norm": 1.0}, False),
        ({"clip_norm": 1.0, "loss_scale": 2.0}, True),
    ],
)
def test_what_is_not_finite(changes: dict[str, Any], left_out: bool) -> None:
    """With `nan: stop` the next loss is not finite either, which ends the run."""
    parameter = nn.Parameter(torch.ones(3))
    steps = stepping(parameter, **changes)
    weights = weights_with(parameter, torch.tensor([1.0, torch.inf, 1.0]))
    steps.update(0, 1, weights, 1, 1)
    assert steps.skipped == left_out
    assert bool(parameter.isfinite().all()) == left_out


def stepping(parameter: nn.Parameter, **changes: Any) -> Stepping:
    """Steps of gradient descent at a rate of 1."""
    given = OptimizerConfig(name="SGD", args={"lr": 1.0})
    config = chain_config(given).model_copy(update=changes)
    named = {"w": parameter}
    optimizer = make_optimizer(given, named)
    steps = StageStepping(optimizer, named, config, LearningRate(None, optimizer, Path()), named)
    losses = LossSum(lambda _: None, torch.device("cpu"))
    return Stepping({0: steps}, config, losses, losses.add_up)


def weights_with(parameter: nn.Parameter, gradient: Tensor) -> Weights:
    weights = Weights({"w": parameter})
    weights.gradients["w"] = gradient
    return weights
