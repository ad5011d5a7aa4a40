"""NASNet-A: the mobile network is the published one; a small one is captured and planned."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from pipedream.capture.export import capture
from pipedream.graph.cluster import Cluster
from pipedream.optimizer.cost.models import COST_MODELS
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request


@pytest.mark.thorough
def test_the_mobile_network_has_the_published_size(nasnet_a: ModuleType) -> None:
    """5.3 million parameters (table 2 of the paper), in other libraries 5,289,978."""
    with torch.device("meta"):
        model = nasnet_a.mobile()
        logits = model(torch.empty(1, 3, 224, 224))
    assert sum(parameter.numel() for parameter in model.parameters()) == 5_289_978
    assert logits.shape == (1, 1000)
    assert [cell.out for cell in model.cells] == [
        *(44, 88),
        *(264, 264, 264, 264),
        *(352, 528, 528, 528, 528),
        *(704, 1056, 1056, 1056, 1056),
    ]


def test_each_reduction_halves_the_image(nasnet_a: ModuleType) -> None:
    sides = []
    with torch.device("meta"):
        model = nasnet_a.mobile(cells=1)
        for cell in model.cells:
            cell.register_forward_hook(lambda _, __, out: sides.append(out.shape[-1]))
        model(torch.empty(1, 3, 224, 224))
    assert sides == [56, 28, 28, 14, 14, 7, 7]


def test_the_data_are_coloured_and_large(nasnet_a: ModuleType) -> None:
    train, held_out = nasnet_a.data(size=32)
    assert (len(train), len(held_out)) == (1437, 360)
    image, digit = train[0]
    assert (image.shape, digit.shape) == ((3, 32, 32), ())
    assert torch.equal(image[0], image[2])


@pytest.mark.thorough
@pytest.mark.slow
def test_a_small_one_is_captured_and_planned(nasnet_a: ModuleType) -> None:
    """As if each node took three seconds."""
    captured = capture(nasnet_a.mobile(4, 96, 1, 10), (torch.randn(2, 3, 32, 32),)).graph
    working = [node for node in captured.nodes.values() if not node.is_input]
    graph = captured.with_nodes(
        replace(node, forward_seconds=1.0, backward_seconds=2.0) for node in working
    )
    cluster = Cluster(machines=(4,), bandwidth=(1e9,))
    work = 3.0 * len(working)
    for name in ("paper", "released"):
        plan = optimize(Request(graph=graph, cluster=cluster, model=COST_MODELS[name](None))).plan
        predicted = plan.predicted
        assert predicted.one_worker_seconds == pytest.approx(work)
        bound, seconds = predicted.lower_bound_seconds, predicted.seconds_per_minibatch
        assert work / 4 <= bound * (1 + 1e-9) <= seconds * (1 + 1e-9) < work
