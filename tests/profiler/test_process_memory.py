"""What passes need by hand, and what is measured beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipedream.capture.captured import Captured
from pipedream.capture.export import capture
from pipedream.graph.profile import Footprint
from pipedream.profiler import process_memory as measured
from pipedream.profiler.memory import footprints
from pipedream.profiler.process_memory import _needed, process_memory

CPU = torch.device("cpu")


def of_layers(width: int, batch: int, layers: int) -> tuple[Captured, torch.Tensor]:
    parts = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh()))
    inputs = torch.randn(batch, width)
    return capture(nn.Sequential(*parts, nn.BatchNorm1d(width)), (inputs,)), inputs


def test_the_most_is_at_the_node_where_saved_bytes_and_gradients_add_up_to_most() -> None:
    captured, _ = of_layers(2, 4, 2)
    graph = captured.graph.with_nodes([])
    nodes = captured.working
    parameters = [graph.nodes[name].parameter_bytes for name in nodes]
    assert parameters == [24, 0, 24, 0, 16]
    kept = dict(zip(nodes, map(Footprint, (5, 10, 0, 20, 1), (1, 1, 40, 1, 1)), strict=True))
    # At the third node 15 are saved, 16 of the last one's gradients are there, and 40 needed.
    assert _needed(graph, nodes, kept, 1) == (15, 16 + 40)
    assert _needed(graph, nodes, kept, 3) == (15 + 2 * 36, 16 + 40)
    assert _needed(graph, nodes[:2], kept, 1) == (15, 1)
    assert _needed(graph, (), kept, 2) == (0, 0)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_process_holds_more_than_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes save more than 64 MB, and buffers are what they were."""
    captured, inputs = of_layers(128, 16384, 16)
    kept = footprints(captured, (inputs,), CPU)
    before = {name: each.clone() for name, each in captured.module.named_buffers()}
    found = process_memory(captured, (inputs,), kept)
    assert found is not None
    assert found.baseline_bytes > 100e6
    assert next(iter(found.gaps)) == captured.working[0]
    assert len(found.gaps) == 4
    assert all(further <= first < 5 for first, further in found.gaps.values())
    assert max(found.gaps.values()) > (0, 0)  # until 2.38 glibc seldom reuses aligned blocks
    for name, buffer in captured.module.named_buffers():
        assert torch.equal(buffer, before[name]), name
    monkeypatch.setattr(measured, "free_memory", lambda device: 100e6)
    assert process_memory(captured, (inputs,), kept) is None
