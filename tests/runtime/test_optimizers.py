"""What an optimizer remembers, put back where torch.optim looks for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipedream.graph.config import OptimizerConfig
from pipedream.runtime.optimizers import make_optimizer, restore_state


@pytest.mark.parametrize(
    ("args", "device"),
    [
        ({}, "meta"),  # fused, unless it is said otherwise
        ({"capturable": True}, "meta"),
        ({"foreach": True}, "cpu"),
        ({"fused": False}, "cpu"),
    ],
)
def test_the_count_of_steps_is_where_the_step_is_made(args: dict[str, bool], device: str) -> None:
    """A resumed run on a GPU stopped at its first step: the fused kernel got a count on the CPU.
    Here the meta device stands for it.
    """
    parameters = {"w": nn.Parameter(torch.empty(2, 3, device="meta"))}
    optimizer = make_optimizer(OptimizerConfig(name="Adam", args=args), parameters)
    known = {"w/step": torch.tensor(7.0), "w/exp_avg": torch.ones(2, 3)}
    restore_state(optimizer, parameters, known)
    found = {key: tensor.device.type for key, tensor in optimizer.state[parameters["w"]].items()}
    assert found == {"step": device, "exp_avg": "meta"}
