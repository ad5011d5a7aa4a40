"""How much a profile is to be trusted: `python scripts/bench/profiles.py [--WHAT] [MODEL]...`

Without more, whether it adds up: each model is profiled as pd-profile does it, with one thread, and
the sum over all nodes set beside forward and backward passes of the plain model itself, one after
each repeat: neighbours in time, on a machine that may be slower for a while. `--again`: each model
is profiled twice, planned for under both, and each plan priced under the other profile. `--saved`:
the bytes that nodes save for backward passes beside what the allocator has given out, and not taken
back, in a forward pass of the plain model. `--depth`: what profiling costs for a model of twice the
layers. A line for each model.
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

from pipedream.capture.captured import flatten_inputs
from pipedream.capture.compute_settings import keep_freed_memory
from pipedream.capture.export import capture
from pipedream.capture.sources.load import Loaded, load, load_config
from pipedream.graph.cluster import Cluster
from pipedream.graph.run_config import read_config
from pipedream.optimizer.calibrate.price_plan import price_plan
from pipedream.optimizer.cost.models import MeasuredCost
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request
from pipedream.profiler.assembly import Measured, Settings
from pipedream.profiler.measure import measure
from pipedream.profiler.memory import footprints
from pipedream.profiler.timing.stopping_rule import StoppingRule

CONFIGS = Path(__file__).parents[2] / "configs"
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
        loaded.loss(returned, loaded.target).backward()
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


def compare(name: str, loaded: Loaded, seconds: float) -> float:
    steps: list[float] = []
    start = time.perf_counter()
    profile = profiled(name, loaded, seconds, lambda part: steps.append(step(loaded))).profile
    taken = time.perf_counter() - start - sum(steps)
    whole = statistics.median(steps)
    summed = profile.totals.forward_seconds + profile.totals.backward_seconds
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


def profiled(
    name: str,
    loaded: Loaded,
    seconds: float,
    after_each: Callable[[float], None] = lambda part: None,
) -> Measured:
    settings = Settings(name, {}, 1, CPU, StoppingRule(seconds=seconds), threads=1)
    return measure(loaded, settings, after_each)


def again(name: str, seconds: float) -> float:
    """How much slower the plan of one profile is than the best, under the other; the worse way."""
    cluster = Cluster(machines=(4,), bandwidth=(1e9,), latency=(1e-4,))
    graphs = [profiled(name, MODELS[name](), seconds).graph for _ in range(2)]
    asked = [
        Request(graph, cluster, MeasuredCost(), rules=Rules(straight=True)) for graph in graphs
    ]
    plans = [optimize(request).plan for request in asked]
    slower = [
        price_plan(other, request).per_minibatch / price_plan(own, request).per_minibatch - 1
        for own, other, request in zip(plans, reversed(plans), asked, strict=True)
    ]
    same = [[stage.nodes for stage in plan.stages] for plan in plans]
    which = "the same plan" if same[0] == same[1] else "another plan"
    print(f"{name:12} {which}, slower by {slower[0]:.2%} and {slower[1]:.2%}", flush=True)
    return max(slower)


def saved(name: str) -> float:
    loaded = MODELS[name]()
    captured = capture(loaded.model, loaded.args, loaded.kwargs)
    found = footprints(captured, flatten_inputs(loaded.args, loaded.kwargs), CPU)
    nodes = captured.graph.nodes
    booked = sum(each.saved for node, each in found.items() if not nodes[node].is_input)
    outputs = sum(captured.values[value].bytes for value in captured.outputs)
    with torch.autograd.profiler.profile(profile_memory=True) as trace:
        returned = loaded.model(*loaded.args, **loaded.kwargs)
        events = trace
    del returned
    assert events.kineto_results is not None
    held = sum(e.nbytes() for e in events.kineto_results.events() if e.name() == "[memory]")
    print(
        f"{name:12} {booked / 1e6:8.1f} MB saved and {outputs / 1e6:6.1f} MB returned,"
        f" {held / 1e6:8.1f} MB given out: ratio {(booked + outputs) / held:.3f}",
        flush=True,
    )
    return (booked + outputs) / held - 1


def depth(layers: int) -> float:
    """How many times as long a model of twice the layers takes to be captured and measured.

    With as many passes of each: otherwise these go by how much they vary.
    """
    took = []
    for count in (layers, 2 * layers):
        torch.manual_seed(0)
        loaded = gpt2(count)
        start = time.perf_counter()
        measure(loaded, Settings("gpt2", {}, 1, CPU, StoppingRule(warmup=2, repeats=10), threads=1))
        took.append(time.perf_counter() - start)
        print(f"gpt2 of {count:2} layers: {took[-1]:.1f} s", flush=True)
    return took[1] / took[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=40.0, help="for the repeats of a model")
    for what in ("again", "saved", "depth"):
        parser.add_argument(f"--{what}", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if options.depth:
        print(f"twice the layers: {depth(6):.2f} times the time")
        return
    off = []
    for name in options.models:
        torch.manual_seed(0)
        if options.again:
            off.append(again(name, options.seconds))
        elif options.saved:
            off.append(saved(name))
        else:
            off.append(compare(name, MODELS[name](), options.seconds) - 1)
    print(f"median {statistics.median(map(abs, off)):.1%}, worst {max(map(abs, off)):.1%}")


if __name__ == "__main__":
    main()
