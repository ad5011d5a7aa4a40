"""Do the times of a profile add up to a step of the model? `python scripts/bench_profile.py`.

Each model is profiled as pd-profile does it, with one thread. The sum over all nodes is set beside
forward and backward passes of the plain model, measured by themselves before and after: a line for
each model, with the seconds that measuring took. Names of models may follow.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedream.graph.config import read_config
from pipedream.graph.heap import keep_freed_memory
from pipedream.profiler.measure import Settings, measure
from pipedream.profiler.source import Loaded, load, load_config
from pipedream.profiler.timing import Patience

CONFIGS = Path(__file__).parents[1] / "configs"
CPU = torch.device("cpu")
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1000,
}


def shipped(name: str) -> Loaded:
    path = CONFIGS / name
    return load_config(read_config(path), path.parent)


def gpt2(layers: int) -> Loaded:
    shape = {"n_layer": layers, "n_embd": 256, "n_head": 4, "vocab_size": 1000}
    return load("transformers:gpt2", shape, 8)


MODELS: dict[str, Callable[[], Loaded]] = {
    "digits": lambda: shipped("digits.yaml"),
    "topics": lambda: shipped("topics.yaml"),
    "vgg16": lambda: load("torchvision:vgg16", {}, 8, ("3x64x64",)),
    "resnet50": lambda: load("torchvision:resnet50", {}, 8, ("3x128x128",)),
    "inception_v3": lambda: load("torchvision:inception_v3", {"aux_logits": False}, 2),
    "densenet121": lambda: load("torchvision:densenet121", {}, 8, ("3x64x64",)),
    "vit_b_16": lambda: load("torchvision:vit_b_16", {"image_size": 112}, 4),
    "gpt2": lambda: gpt2(4),
    "bert": lambda: load(
        "transformers:bert",
        {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1000},
        8,
    ),
    "llama": lambda: load("transformers:llama", LLAMA, 4),
}


def step(loaded: Loaded) -> float:
    """Seconds of a forward and a backward pass of the model itself."""
    parameters = [p for p in loaded.model.parameters() if p.requires_grad]
    start = time.perf_counter()
    returned: Any = loaded.model(*loaded.args, **loaded.kwargs)
    if loaded.loss is not None:
        loaded.loss(returned).backward()
        taken = time.perf_counter() - start
    else:
        leaves = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in leaves if leaf.requires_grad]
        taken = time.perf_counter() - start
        gradients = [torch.randn_like(output) for output in outputs]
        start = time.perf_counter()
        torch.autograd.backward(outputs, gradients)
        taken += time.perf_counter() - start
    for parameter in parameters:
        parameter.grad = None
    return taken


def steps(loaded: Loaded, seconds: float = 5.0) -> list[float]:
    """After some to warm up."""
    for _ in range(2):
        step(loaded)
    found: list[float] = []
    while len(found) < 5 or sum(found) < seconds:
        found.append(step(loaded))
    return found


def compare(name: str, loaded: Loaded, seconds: float) -> float:
    before = steps(loaded)
    start = time.perf_counter()
    settings = Settings(name, {}, 1, CPU, Patience(seconds=seconds), threads=1)
    _, profile = measure(loaded, settings)
    taken = time.perf_counter() - start
    whole = statistics.median([*before, *steps(loaded)])
    loss = profile.loss
    summed = profile.totals.forward_seconds + profile.totals.backward_seconds
    if loss is not None:
        summed += loss.forward_seconds.median + loss.backward_seconds.median
    assert profile.forward is not None
    assert profile.backward is not None
    print(
        f"{name:12} {len(profile.nodes):4} nodes in {taken:5.1f} s, {profile.repeats:3} repeats:"
        f" {summed * 1e3:8.2f} ms summed, {whole * 1e3:8.2f} whole, ratio {summed / whole:.3f};"
        f" stretches off by {profile.forward.typical_error:.1%}, {profile.forward.worst_error:.1%}"
        f" forward, {profile.backward.typical_error:.1%}, {profile.backward.worst_error:.1%} back;"
        f" factors {profile.forward.factor:.3f}, {profile.backward.factor:.3f}",
        flush=True,
    )
    return summed / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=15.0, help="for the repeats of a model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    ratios = []
    for name in options.models:
        torch.manual_seed(0)
        ratios.append(compare(name, MODELS[name](), options.seconds))
    print(f"furthest from 1: {max(abs(ratio - 1) for ratio in ratios):.1%}")


if __name__ == "__main__":
    main()
