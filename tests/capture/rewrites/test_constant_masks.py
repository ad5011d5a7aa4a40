"""Attention with masks that hide nothing, that say what is_causal says, and with others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pipedream.capture.captured import Captured, flatten_inputs
from pipedream.capture.export import capture
from pipedream.capture.rewrites.constant_masks import in_place_of
from pipedream.capture.sources.load import load

LENGTH = 7


def causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def additive(lowest: float) -> Tensor:
    return torch.zeros(LENGTH, LENGTH).masked_fill(~causal(), lowest)


CAUSAL: dict[str, Callable[[], Tensor]] = {
    "bool": causal,
    "of each example": lambda: causal()[None, None].expand(2, 1, LENGTH, LENGTH),
    "infinite": lambda: additive(-math.inf),
    "lowest": lambda: additive(torch.finfo(torch.float32).min),
    "by positions": lambda: torch.arange(LENGTH)[None, :] <= torch.arange(LENGTH)[:, None],
}

HIDE_NOTHING: dict[str, Callable[[], Tensor]] = {
    "bool": lambda: torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool),
    "of keys": lambda: torch.ones(1, LENGTH, dtype=torch.bool),
    "zeros": lambda: torch.zeros(LENGTH, LENGTH),
}

OTHERS: dict[str, Callable[[], Tensor]] = {
    "window": lambda: causal() & ~causal().tril(-3),
    "without itself": lambda: causal().tril(-1) | torch.eye(LENGTH, dtype=torch.bool)[:1],
    "backward": lambda: causal().T,
    "small": lambda: additive(-30.0),
    "biased": lambda: additive(-math.inf) + 0.1 * torch.arange(LENGTH),
    "of one example": lambda: torch.stack([causal(), causal() | True])[:, None],
}


class Attention(nn.Module):
    def __init__(self, mask: Callable[[], Tensor]) -> None:
        super().__init__()
        self.mask, self.project = mask, nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).view(2, LENGTH, 3, 2, 4).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        return scaled_dot_product_attention(query, key, value, attn_mask=self.mask(), scale=0.3)


class Kept(Attention):
    """Its mask is a buffer, of which a checkpoint may have another."""

    def __init__(self) -> None:
        super().__init__(lambda: self.seen)
        self.register_buffer("seen", causal())


class Given(nn.Module):
    """Its mask depends on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(causal)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = causal() & (torch.arange(LENGTH) < lengths[:, None, None, None])
        self.attention.mask = lambda: mask
        return self.attention(x)


def attentions(captured: Captured) -> list[tuple[bool, bool]]:
    """Of each call: whether it has a mask, and whether it is told that it is causal."""
    graph = captured.module.graph
    target = torch.ops.aten.scaled_dot_product_attention.default
    calls = graph.find_nodes(op="call_function", target=target)
    return [(len(c.args) > 3 and c.args[3] is not None, c.args[5:6] == (True,)) for c in calls]


def operators(captured: Captured) -> set[str]:
    return {str(node.target) for node in captured.module.graph.nodes if node.op == "call_function"}


def assert_equal(captured: Captured, model: nn.Module, *inputs: Tensor) -> None:
    """Outputs and gradients."""
    (output,) = captured.module(*inputs)
    expected = model(*inputs)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    own, theirs = list(captured.module.parameters()), list(model.parameters())
    direction = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(output, own, direction),
        torch.autograd.grad(expected, theirs, direction),
        rtol=1e-5,
        atol=1e-6,
    )


def captured_with(mask: Callable[[], Tensor]) -> Captured:
    """Attention with this mask, which computes what it should."""
    model, x = Attention(mask), torch.randn(2, LENGTH, 8)
    captured = capture(model, (x,))
    assert_equal(captured, model, x)
    return captured


@pytest.mark.parametrize("mask", CAUSAL.values(), ids=CAUSAL)
def test_a_causal_mask_is_told(mask: Callable[[], Tensor]) -> None:
    captured = captured_with(mask)
    assert attentions(captured) == [(False, True)]
    assert not {each for each in operators(captured) if "tril" in each or "arange" in each}


@pytest.mark.parametrize("mask", HIDE_NOTHING.values(), ids=HIDE_NOTHING)
def test_a_mask_that_hides_nothing_is_left_out(mask: Callable[[], Tensor]) -> None:
    assert attentions(captured_with(mask)) == [(False, False)]


@pytest.mark.parametrize("mask", OTHERS.values(), ids=OTHERS)
def test_other_masks_stay(mask: Callable[[], Tensor]) -> None:
    assert attentions(captured_with(mask)) == [(True, False)]


def test_masks_that_may_change_stay() -> None:
    x, lengths = torch.randn(2, LENGTH, 8), torch.tensor([LENGTH, 4])
    captured = capture(Kept(), (x,))
    assert attentions(captured) == [(True, False)]
    model = Given()
    captured = capture(model, (x, lengths))
    assert attentions(captured) == [(True, False)]
    assert_equal(captured, model, x, lengths)


def test_a_mask_of_more_keys_than_queries_is_another() -> None:
    assert in_place_of(torch.ones(3, 5, dtype=torch.bool).tril()) is None
    assert in_place_of(torch.ones(3, 3, dtype=torch.bool).tril()) == "causal"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "bert"])
def test_models_of_transformers_compute_no_mask(family: str) -> None:
    """Their attention computed all scores, and at 8,192 tokens a fifth of the time was that."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    grouped = {"intermediate_size": 48, "num_key_value_heads": 2}
    more = {"gpt2": {}, "bert": {"intermediate_size": 48}}.get(family, grouped)
    loaded = load(f"transformers:{family}", sizes | more, 2, ("16:int64:64",), False)
    loaded.model.eval()  # dropout draws otherwise
    captured = capture(loaded.model, loaded.args, loaded.kwargs, training=False)
    assert attentions(captured) == [(False, family != "bert")] * 2
    given = flatten_inputs(loaded.args, loaded.kwargs)
    with torch.no_grad():
        output = captured.module(*given)[0]
        expected = loaded.model(*loaded.args, **loaded.kwargs)
    logits = expected.logits if hasattr(expected, "logits") else expected
    torch.testing.assert_close(output, logits, rtol=1e-6, atol=1e-6)


def test_a_window_of_mistral_stays() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 4}
    loaded = load("transformers:mistral", sizes | more, 2, ("16:int64:64",), False)
    assert attentions(capture(loaded.model, loaded.args, loaded.kwargs)) == [(True, False)]
