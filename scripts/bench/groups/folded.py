"""What does evaluation gain where batch norms are part of their convolutions?

    python scripts/bench/groups/folded.py [MODEL]...

Models of torchvision without training, as a stage of pd-train evaluates them: with and without
folded norms, in turns. Prints norms, milliseconds of a minibatch, medians, and how far the outputs
are off, in parts of the largest.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial

import pandas as pd
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils.benchmark import Timer

from pipedream.capture.export import capture
from pipedream.capture.rewrites.fold_norms import fold_norms
from pipedream.capture.segment import freeze_constants, segment
from pipedream.capture.sources.vision import load_torchvision

MODELS = "resnet18", "resnet50", "mobilenet_v3_small", "regnet_y_400mf", "vgg11_bn", "densenet121"
BATCHES = 1, 16
TURNS = 15


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name in sys.argv[1:] or MODELS:
        model = load_torchvision(name, {"num_classes": 10}).eval()
        moved(model)
        for batch in BATCHES:
            rows.append({"model": name, "batch": batch, **compared(model, batch)})
            print(*rows[-1].values(), flush=True)
    print(pd.DataFrame(rows).to_string(index=False, float_format="%.3g"))


def moved(model: nn.Module) -> None:
    """Gives norms statistics that matter."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(0.0, 0.1)
            norm.running_var.uniform_(0.5, 2.0)


@torch.no_grad()
def compared(model: nn.Module, batch: int) -> dict[str, float]:
    inputs = torch.randn(batch, 3, 128, 128)
    captured = capture(model, (inputs,), training=False)
    both: list[fx.GraphModule] = []
    for _ in range(2):
        part = segment(captured, captured.working, captured.outputs)
        both.append(freeze_constants(part, captured.owner).module)
    folded = fold_norms(both[1])
    tensors: dict[str, Tensor] = dict(both[1].named_parameters()) | dict(both[1].named_buffers())
    given = tensors, tensors | folded.values(tensors)
    runs = [partial(functional_call, *each, (inputs,)) for each in zip(both, given, strict=True)]
    timers = [Timer("run()", globals={"run": run}) for run in runs]
    seconds: list[list[float]] = [[], []]
    for turn in range(TURNS + 1):
        for timer, own in zip(timers, seconds, strict=True):
            took = timer.timeit(1).mean
            if turn:
                own.append(took)
    plain, made = (1e3 * statistics.median(own) for own in seconds)
    (right, *_), (found, *_) = (run() for run in runs)
    off = float((found - right).abs().max() / right.abs().max())
    gain = plain / made
    return {"norms": len(folded.folds), "plain": plain, "folded": made, "gain": gain, "off": off}


if __name__ == "__main__":
    main()
