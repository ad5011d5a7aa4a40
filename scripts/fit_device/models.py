"""Models whose profiles a device file is fitted to, and others that it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Case(NamedTuple):
    source: str
    batch_size: int
    args: Mapping[str, Any] = MappingProxyType({})
    inputs: tuple[str, ...] = ()


def _tokens(count: int) -> tuple[str, ...]:
    return (f"{count}:int64:1000",)


def _llama(width: int, heads: int, kv: int, feed: int, layers: int, vocabulary: int) -> dict:
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": feed,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
    }


GPU_FIT = {
    "llama-8b": Case("transformers:llama", 1, _llama(4096, 32, 8, 14336, 2, 128256), _tokens(4096)),
    "llama-70b": Case("transformers:llama", 1, _llama(8192, 64, 8, 28672, 1, 32000), _tokens(2048)),
    "llama-1b": Case("transformers:llama", 4, _llama(2048, 32, 8, 8192, 3, 32000), _tokens(1024)),
    "gpt2": Case("transformers:gpt2", 8, {"n_layer": 3}, _tokens(1024)),
    "gpt2-xl": Case(
        "transformers:gpt2", 2, {"n_layer": 2, "n_embd": 1600, "n_head": 25}, _tokens(1024)
    ),
    "bert": Case("transformers:bert", 32, {"num_hidden_layers": 3}, _tokens(128)),
    "mlp": Case("probes:products", 4096, {"widths": [256, 1024, 4096, 512, 2048, 8192, 128]}),
    "mlp-small": Case("probes:products", 256, {"widths": [256, 1024, 4096, 512, 2048, 8192, 128]}),
    "vit-large": Case("timm:vit_large_patch16_224", 64, {"depth": 3}),
    "resnet50": Case("torchvision:resnet50", 64),
    "resnet50-small": Case("torchvision:resnet50", 8),
    "mobilenet": Case("torchvision:mobilenet_v2", 64),
    "vgg16": Case("torchvision:vgg16", 32),
    "densenet": Case("torchvision:densenet121", 32),
}
GPU_HELD_OUT = {
    "gpt2-medium": Case(
        "transformers:gpt2", 4, {"n_layer": 6, "n_embd": 1024, "n_head": 16}, _tokens(1024)
    ),
    "llama-3b": Case("transformers:llama", 1, _llama(3072, 24, 8, 8192, 3, 128256), _tokens(2048)),
    "vit-base": Case("timm:vit_base_patch16_224", 64),
    "resnet101": Case("torchvision:resnet101", 32),
    "regnet": Case("torchvision:regnet_y_8gf", 32),
    "convnext": Case("timm:convnext_tiny", 64),
}
CPU_FIT = {
    "gpt2": Case("transformers:gpt2", 1, {"n_layer": 2}, _tokens(128)),
    "llama": Case("transformers:llama", 1, _llama(512, 8, 4, 1376, 3, 4096), _tokens(128)),
    "llama-wide": Case("transformers:llama", 1, _llama(1024, 16, 8, 2816, 2, 8192), _tokens(256)),
    "bert": Case("transformers:bert", 4, {"num_hidden_layers": 2}, _tokens(64)),
    "bert-small": Case(
        "transformers:bert",
        2,
        {
            "num_hidden_layers": 3,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_attention_heads": 4,
        },
        _tokens(128),
    ),
    "mlp": Case("probes:products", 64, {"widths": [256, 1024, 2048, 512, 1536, 128]}),
    "mlp-large": Case("probes:products", 512, {"widths": [256, 1024, 512, 128]}),
    "vit": Case("timm:vit_tiny_patch16_224", 4, {"depth": 6}),
    "resnet18": Case("torchvision:resnet18", 4),
    "resnet50": Case("torchvision:resnet50", 2),
    "mobilenet": Case("torchvision:mobilenet_v2", 4),
    "vgg11": Case("torchvision:vgg11", 2),
    "densenet": Case("torchvision:densenet121", 2),
    "resnext": Case("torchvision:resnext50_32x4d", 2),
    "swin": Case("torchvision:swin_t", 1),
    "mobilenet-v3": Case("torchvision:mobilenet_v3_small", 8),
}
CPU_HELD_OUT = {
    "distilbert": Case("transformers:distilbert", 2, {"n_layers": 3}, _tokens(128)),
    "opt": Case("transformers:opt", 1, {"num_hidden_layers": 3}, _tokens(128)),
    "resnet34": Case("torchvision:resnet34", 4),
    "regnet": Case("torchvision:regnet_y_400mf", 8),
    "vit-small": Case("timm:vit_small_patch16_224", 2),
    "convnext": Case("timm:convnext_tiny", 1),
}
SETS = {
    "cpu": {"fit": CPU_FIT, "held-out": CPU_HELD_OUT},
    "cuda": {"fit": GPU_FIT, "held-out": GPU_HELD_OUT},
}
