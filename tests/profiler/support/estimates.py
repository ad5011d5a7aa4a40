"""Operators, device files and models to estimate."""

from __future__ import annotations

from typing import Any

import torch

from pipedream.capture.sources.load import load
from pipedream.graph.placements.operators import Argument, Input, Operator, TensorType
from pipedream.profiler.assembly import Measured, Settings
from pipedream.profiler.estimate.device_file import DeviceFile, read_device
from pipedream.profiler.estimate.estimate import estimate
from pipedream.profiler.timing.stopping_rule import StoppingRule

SIZES = {"float32": 4, "bfloat16": 2, "int64": 8}


def tensor(*shape: int, dtype: str = "float32") -> TensorType:
    return TensorType(shape=shape, dtype=dtype, element_bytes=SIZES[dtype])


def operator(
    target: str,
    inputs: tuple[TensorType, ...],
    *outputs: TensorType | None,
    rest: tuple[Argument, ...] = (),
) -> Operator:
    arguments = (*(Input(input=k) for k in range(len(inputs))), *rest)
    return Operator(target=target, arguments=arguments, inputs=inputs, outputs=outputs)


PRODUCT = [(8.0, 8.0, 8.0, 0.0, 0.25), (12.0, 12.0, 12.0, 0.0, 0.75)]
PASS = [(10.0, 0.1), (20.0, 0.5), (30.0, 0.9)]


def device(**changes: Any) -> DeviceFile:
    fields: dict[str, Any] = {
        "name": "a device",
        "device": "cuda",
        "sources": ("made up",),
        "memory": 1e9,
        "bandwidth": 1e12,
        "peak": {"float32": 1e14, "bfloat16": 2e14},
        "launch": 1e-6,
        "efficiency": {
            "product": {"bfloat16": PRODUCT},
            "pass": {"float32": PASS},
        },
    }
    return DeviceFile.model_validate(fields | changes)


CPU = torch.device("cpu")
TRANSFORMER = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "torchvision:resnet18": ({}, ("3x32x32",)),
    "torchvision:mobilenet_v2": ({}, ("3x64x64",)),
    "transformers:bert": (
        {**TRANSFORMER, "num_hidden_layers": 2, "intermediate_size": 128},
        ("16:int64:100",),
    ),
    "transformers:llama": (
        {
            **TRANSFORMER,
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "num_key_value_heads": 2,
        },
        ("16:int64:100",),
    ),
    "timm:vit_tiny_patch16_224": ({"depth": 2}, ()),
}


def estimated(source: str, device: str = "cpu") -> Measured:
    args, inputs = MODELS[source]
    loaded = load(source, args, 2, inputs, meta=True)
    settings = Settings(source, args, 2, CPU, StoppingRule(), 1, meta=True)
    return estimate(loaded, settings, read_device(device))
