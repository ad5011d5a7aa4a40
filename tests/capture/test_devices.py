"""A piece of a model runs on another device than it was captured on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipedream.capture.export import capture
from pipedream.capture.segment import segment


def test_devices_among_the_arguments_of_operators_are_those_of_the_stage() -> None:
    """`x.to(y.device)` has the device by position. A Llama of transformers has one, and could not
    be captured for a GPU, nor run on one.
    """

    class Moves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ramp = torch.arange(3, device=x.device)
            return x + ramp.to(x.device, torch.float32)

    captured = capture(Moves(), (torch.randn(2, 3),))
    piece = segment(captured, captured.working, keep=captured.outputs).to(torch.device("meta"))
    (value,) = piece.module(torch.empty(2, 3, device="meta"))
    assert value.device.type == "meta"
    placed = [
        argument
        for node in piece.module.graph.nodes
        for argument in (*node.args, *node.kwargs.values())
        if isinstance(argument, torch.device)
    ]
    assert [each.type for each in placed] == ["meta", "meta"]
