"""What does a backward pass in two halves cost? `python scripts/bench/split_backward.py [MODEL]...`

For each model (mlp, vgg, gpt, resnet), as a stage whose input wants a gradient, in one process of
one thread: passes by autograd and as programs (pipedream.capture.programs) in turns. Medians in ms:
forward, backward; forward, gradients of the inputs (BI), of the weights (BW); and the ratios of the
whole steps and of BI + BW to the backward pass.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pandas as pd
import torch
from prediction import MODELS, prepare
from torch import Tensor
from torch.func import functional_call

from pipedream.capture.captured import flatten_inputs
from pipedream.capture.compute_settings import keep_freed_memory
from pipedream.capture.export import capture
from pipedream.capture.programs.program import Program, traced_program
from pipedream.capture.segment import Segment, freeze_constants, segment
from pipedream.capture.sources.load import load_config
from pipedream.graph.run_config import read_config

TURNS, WARM_UP = 25, 5
FIRST = 2
"""Nodes of the stage before: it gives this one an input that wants a gradient."""


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        rows = [compare(name, Path(folder)) for name in sys.argv[1:] or MODELS]
    print(pd.DataFrame(rows).to_string(index=False, float_format="%.3f"))


def compare(name: str, folder: Path) -> dict[str, object]:
    part, inputs, wants = stage(prepare(name, folder / f"{name}.yaml", 1))
    named = [*part.module.named_parameters(), *part.module.named_buffers()]
    read = {node.target for node in part.module.graph.find_nodes(op="get_attr")}
    state = {key: tensor for key, tensor in named if key in read}
    program = traced_program(part.module, state, inputs, wants)
    with torch.no_grad():
        outputs = functional_call(part.module, dict(state), tuple(inputs))
    ends = [outputs[k] for k in program.joint.differentiable]
    after = [torch.randn_like(end) / end.numel() for end in ends]
    plain, own = [], []
    for _ in range(WARM_UP + TURNS):
        plain.append(by_autograd(part, state, inputs, wants, after))
        own.append(by_program(program, state, inputs, after))
    forward, backward = medians(plain[WARM_UP:])
    again, of_inputs, of_weights = medians(own[WARM_UP:])
    return {
        "model": name,
        "F": forward,
        "B": backward,
        "F'": again,
        "BI": of_inputs,
        "BW": of_weights,
        "step": (again + of_inputs + of_weights) / (forward + backward),
        "halves": (of_inputs + of_weights) / backward,
    }


def medians(turns: Sequence[Sequence[float]]) -> list[float]:
    """In ms."""
    return [1e3 * statistics.median(each) for each in zip(*turns, strict=True)]


def stage(config: Path) -> tuple[Segment, list[Tensor], list[bool]]:
    """All nodes but the first ones, with what it is given and whether that wants gradients."""
    run = read_config(config)
    loaded = load_config(run, config.parent, run.batch_size, meta=False)
    captured = capture(loaded.model, loaded.args, loaded.kwargs)
    nodes = captured.working
    before, after = (
        freeze_constants(segment(captured, part, keep=captured.outputs), captured.owner)
        for part in (nodes[:FIRST], nodes[FIRST:])
    )
    given = flatten_inputs(loaded.args, loaded.kwargs)
    known = dict(zip(captured.inputs, given, strict=True))
    with torch.no_grad():
        results = before.module(*(known[name] for name in before.inputs))
    known.update(zip(before.outputs, results, strict=True))
    wants = [captured.values[name].requires_grad for name in after.inputs]
    return after, [known[name] for name in after.inputs], wants


def by_autograd(
    part: Segment,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    wants: Sequence[bool],
    after: Sequence[Tensor],
) -> list[float]:
    leaves = {n: t.detach().requires_grad_(t.requires_grad) for n, t in state.items()}
    own = [x.detach().requires_grad_(w) for x, w in zip(inputs, wants, strict=True)]
    marks = [time.perf_counter()]
    outputs = functional_call(part.module, leaves, tuple(own))
    marks.append(time.perf_counter())
    wanted = [tensor for tensor in (*own, *leaves.values()) if tensor.requires_grad]
    ends = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(ends, list(after), inputs=wanted)
    return between([*marks, time.perf_counter()])


def by_program(
    program: Program, state: Mapping[str, Tensor], inputs: Sequence[Tensor], after: Sequence[Tensor]
) -> list[float]:
    weights = {name: tensor.detach() for name, tensor in state.items()}
    marks = [time.perf_counter()]
    _, saved = program.forward(weights, inputs, program.draw())
    marks.append(time.perf_counter())
    _, kept = program.backward(saved, after)
    marks.append(time.perf_counter())
    gradients = dict(program.weight_gradients(kept))
    marks.append(time.perf_counter())
    assert gradients
    return between(marks)


def between(marks: Sequence[float]) -> list[float]:
    return [end - begin for begin, end in pairwise(marks)]


if __name__ == "__main__":
    main()
