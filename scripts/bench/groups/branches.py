"""Do independent branches that run side by side take less time than one after the other?

    python scripts/bench/groups/branches.py [--threads 2] [--batch 4] [--device cpu]

Blocks of Inception-v3 with four branches each, and two towers of a recommender, forward and
backward (a branch has its own backward pass). One branch after the other, each operator with all
threads, against as many branches at once as there are threads, each with one; on a GPU on streams.
Prints milliseconds, medians in turns, and whether outputs and gradients are equal.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import click
import pandas as pd
import torch
from torch import Tensor, nn

TURNS = 31
Results = Sequence[Tensor]


def conv(given: int, gives: int, *kernel: int) -> nn.Module:
    padding = [size // 2 for size in kernel]
    layers = nn.Conv2d(given, gives, kernel, padding=padding, bias=False), nn.BatchNorm2d(gives)
    return nn.Sequential(*layers, nn.ReLU())


def chain(given: int, *layers: tuple[int, int, int]) -> nn.Module:
    """Convolutions after each other: (channels, height, width of the kernel)."""
    widths = [given, *(gives for gives, *_ in layers)]
    pairs = zip(widths, layers, strict=False)
    return nn.Sequential(*(conv(before, gives, *kernel) for before, (gives, *kernel) in pairs))


def pooled(given: int, gives: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(given, gives, 1, 1))


def tower(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())


def cases(batch: int) -> dict[str, tuple[list[nn.Module], Tensor]]:
    early = [
        chain(192, (64, 1, 1)),
        chain(192, (48, 1, 1), (64, 5, 5)),
        chain(192, (64, 1, 1), (96, 3, 3), (96, 3, 3)),
        pooled(192, 32),
    ]
    late = [
        chain(768, (192, 1, 1)),
        chain(768, (128, 1, 1), (128, 1, 7), (192, 7, 1)),
        chain(768, (128, 1, 1), (128, 7, 1), (128, 1, 7), (128, 7, 1), (192, 1, 7)),
        pooled(768, 192),
    ]
    return {
        "Inception 35x35": (early, torch.randn(batch, 192, 35, 35)),
        "Inception 17x17": (late, torch.randn(batch, 768, 17, 17)),
        "two towers": ([tower(512), tower(512)], torch.randn(16 * batch, 512)),
    }


def learn(branch: nn.Module, x: Tensor) -> Results:
    y = branch(x)
    return y, *torch.autograd.grad(y, list(branch.parameters()), torch.ones_like(y))


def in_turn(branches: Sequence[nn.Module], x: Tensor) -> list[Results]:
    return [learn(branch, x) for branch in branches]


def at_once(pool: ThreadPoolExecutor, branches: Sequence[nn.Module], x: Tensor) -> list[Results]:
    return list(pool.map(partial(learn, x=x), branches))


def on_streams(
    streams: Sequence[torch.cuda.Stream], branches: Sequence[nn.Module], x: Tensor
) -> list[Results]:
    now, found = torch.cuda.current_stream(), []
    for stream, branch in zip(streams, branches, strict=False):
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            found.append(learn(branch, x))
    for stream in streams:
        now.wait_stream(stream)
    return found


def seconds(run: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@click.command()
@click.option("--threads", default=2, show_default=True)
@click.option("--batch", default=4, show_default=True)
@click.option("--device", default="cpu", show_default=True)
def main(threads: int, batch: int, device: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    on, rows = torch.device(device), []
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for name, (branches, x) in cases(batch).items():
            own, given = [branch.to(on) for branch in branches], x.to(on)
            ways: list[Callable[[], list[Results]]] = [partial(in_turn, own, given)]
            if on.type == "cuda":
                streams = [torch.cuda.Stream(on) for _ in own]
                ways.append(partial(on_streams, streams, own, given))
            else:
                ways.append(partial(at_once, pool, own, given))
            right, found = ([each for one in way() for each in one] for way in ways)
            pairs = list(zip(found, right, strict=True))
            off = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
            took = [[seconds(way, on) for way in ways] for _ in range(TURNS)]
            before, after = (1e3 * statistics.median(each) for each in zip(*took, strict=True))
            gain = statistics.median(one / other for one, other in took)
            row = {"branches": name, "in turn": before, "at once": after, "gain": gain, "off": off}
            rows.append(row)
    print(pd.DataFrame(rows).to_string(index=False, float_format="%.3g"))


if __name__ == "__main__":
    main()
