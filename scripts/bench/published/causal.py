"""Causal language models of transformers whose attention is told that it is causal.

Exported, those of transformers are given a mask instead, and attention with a mask computes all
scores: twice the work, of which published runs do half.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM


def model(family: str, **settings: Any) -> nn.Module:
    """Returns a model of this family, such as llama or gpt2, with these settings."""
    config = AutoConfig.for_model(family, use_cache=False, **settings)
    config._attn_implementation = "causal"
    return AutoModelForCausalLM.from_config(config)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **options: Any
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scale = options.get("scaling")
    attended = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register("causal", _attend)
