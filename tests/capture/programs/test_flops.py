"""How much work operators are, beside torch's own count."""

from __future__ import annotations

import pytest
import torch
from joint_models import MODELS, traced_model
from torch import fx
from torch.utils.flop_counter import flop_registry

from pipedream.capture.programs.description import describe
from pipedream.graph.placements.operators import flops


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MODELS)
def test_products_convolutions_and_attention(name: str) -> None:
    """torch leaves out the gradient of pictures that want none, which is counted here: convolutions
    are alike within a factor of two, the rest exactly.
    """
    traced = traced_model(name)
    calls = {call.name: call.operator for call in describe(traced.joint).calls}
    counted = 0
    for node in traced.joint.module.graph.nodes:
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if count is None or node.name not in calls:
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        expected = count(*args, **kwargs, out_val=node.meta["val"])
        found = flops(calls[node.name])
        counted += 1
        if node.target is torch.ops.aten.convolution_backward.default:
            assert expected <= found <= 2 * expected
        else:
            assert found == expected, node.target
    assert counted >= 4
