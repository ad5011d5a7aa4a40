"""The steps of a stage that has nothing to learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
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
