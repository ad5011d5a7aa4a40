"""A model without memory: the footprints of the real one, a time for each node."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipedream.capture.captured import flatten_inputs
from pipedream.capture.export import capture
from pipedream.capture.fake_tensors import capture_fake
from pipedream.capture.sources.load import load
from pipedream.profiler.assembly import Settings
from pipedream.profiler.measure import measure
from pipedream.profiler.memory import footprints
from pipedream.profiler.timing.stopping_rule import StoppingRule

CPU = torch.device("cpu")
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "torchvision:resnet18": ({}, ("3x32x32",)),
    "transformers:bert": (
        {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50},
        (),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("source", MODELS)
def test_what_nodes_keep_is_what_those_of_the_real_model_keep(source: str) -> None:
    args, inputs = MODELS[source]
    real, bare = (load(source, args, 2, inputs, meta=meta) for meta in (False, True))
    whole = capture(real.model, real.args, real.kwargs)
    taken = flatten_inputs(real.args, real.kwargs)
    expected = footprints(whole, taken, CPU)
    captured = capture_fake(bare.model, bare.args, bare.kwargs)
    found = footprints(captured, flatten_inputs(bare.args, bare.kwargs), CPU, meta=True)
    # Of made-up values, which are never transposed views, another node may be the one that copies.
    differ = [n for n in found if found[n].saved != expected[n].saved]
    assert len(differ) <= 2
    assert sum(each.saved for each in found.values()) == sum(e.saved for e in expected.values())
    assert sum(each.workspace for each in found.values()) == pytest.approx(
        sum(each.workspace for each in expected.values()), rel=0.05
    )


@pytest.mark.thorough
def test_every_node_is_timed() -> None:
    loaded = load("torchvision:resnet18", {}, 2, ("3x32x32",), meta=True)
    settings = Settings("net", {}, 2, CPU, StoppingRule(1, 3), 1, meta=True)
    seen: list[float] = []
    profile = measure(loaded, settings, seen.append).profile
    assert (profile.repeats, profile.warmup, seen[-1]) == (3, 1, 1.0)
    for node in profile.nodes[1:]:
        assert node.forward_seconds.median > 0, node
    assert profile.totals.backward_seconds > 0
    assert profile.stretches == ()
    assert profile.forward is None
    assert profile.updates.keys() == {"sgd", "momentum", "adam"}


@pytest.mark.thorough
def test_equal_layers_take_equal_time() -> None:
    """Those of a Llama, measured minutes apart, differed by a factor of nine."""
    loaded = load("torchvision:resnet18", {}, 2, ("3x32x32",), meta=True)
    settings = Settings("net", {}, 2, CPU, StoppingRule(1, 3), 1, meta=True)
    profile = measure(loaded, settings, lambda _part: None).profile
    alike: dict[str, list[Any]] = {}
    for node in profile.nodes:
        if node.module.startswith("layer1") and node.description.startswith("Conv2d"):
            alike.setdefault(node.description, []).append(node.forward_seconds)
    (times,) = alike.values()
    assert len(times) == 4
    assert len(set(map(str, times))) == 1
    first = profile.nodes[1]
    assert str(first.forward_seconds) != str(times[0])
