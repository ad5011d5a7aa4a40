"""Do the node times of a profile add up to the whole model? `python scripts/bench_profile.py`.

For each model one line: nodes, seconds to capture and to time, and milliseconds forward and
backward, first summed over the nodes, then of the whole model measured by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedream.graph.config import read_config
from pipedream.profiler.capture import capture, flatten_inputs
from pipedream.profiler.source import Loaded, load, load_config
from pipedream.profiler.timing import time_nodes

WARMUP, REPEATS = 3, 10
CONFIGS = Path(__file__).parents[1] / "configs"
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
}


def shipped(name: str) -> Loaded:
    path = CONFIGS / name
    return load_config(read_config(path), path.parent)


MODELS: dict[str, Callable[[], Loaded]] = {
    "digits": lambda: shipped("digits.yaml"),
    "topics": lambda: shipped("topics.yaml"),
    "vgg16": lambda: load("torchvision:vgg16", {}, 8, ("3x64x64",)),
    "resnet50": lambda: load("torchvision:resnet50", {}, 8, ("3x128x128",)),
    "densenet121": lambda: load("torchvision:densenet121", {}, 8, ("3x64x64",)),
    "gpt2": lambda: load(
        "transformers:gpt2", {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 1000}, 8
    ),
    "llama": lambda: load("transformers:llama", LLAMA, 4),
}


def whole(loaded: Loaded) -> tuple[float, float]:
    """Median seconds of the model itself, forward and backward."""
    turns = [one_pass(loaded) for _ in range(WARMUP + REPEATS)][WARMUP:]
    forward, backward = zip(*turns, strict=True)
    return statistics.median(forward), statistics.median(backward)


def one_pass(loaded: Loaded) -> tuple[float, float]:
    start = time.perf_counter()
    returned: Any = loaded.model(*loaded.args, **loaded.kwargs)
    forward = time.perf_counter() - start
    leaves = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = [torch.randn_like(output) for output in outputs]
    parameters = list(loaded.model.parameters())
    start = time.perf_counter()
    torch.autograd.grad(outputs, parameters, gradients, allow_unused=True)
    return forward, time.perf_counter() - start


def compare(name: str, loaded: Loaded) -> None:
    before = whole(loaded)
    start = time.perf_counter()
    captured = capture(loaded.model, loaded.args, loaded.kwargs)
    captured_in = time.perf_counter() - start
    inputs = flatten_inputs(loaded.args, loaded.kwargs)
    start = time.perf_counter()
    timings = time_nodes(captured, inputs, WARMUP, REPEATS, torch.device("cpu"))
    timed_in = time.perf_counter() - start
    after = whole(loaded)
    forward = sum(timing.forward.median for timing in timings.values())
    backward = sum(timing.backward.median for timing in timings.values())
    apart = [(first + second) / 2 for first, second in zip(before, after, strict=True)]
    print(
        f"{name:12} {len(timings):4} nodes, capture {captured_in:5.1f} s, timing {timed_in:5.1f} s;"
        f" forward {forward * 1e3:8.2f} / {apart[0] * 1e3:8.2f} ms,"
        f" backward {backward * 1e3:8.2f} / {apart[1] * 1e3:8.2f} ms,"
        f" sum / whole {(forward + backward) / sum(apart):.2f}",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)
    for name, make in MODELS.items():
        torch.manual_seed(0)
        compare(name, make())


if __name__ == "__main__":
    main()
