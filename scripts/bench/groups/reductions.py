"""Do other mappings of awkward reductions (seed 003, 5.3) pay, on this device?

    python scripts/bench/groups/reductions.py [--threads 1] [--device cpu]

Sums, means and softmax over the last dimension of 750000 x 32 (many short rows) and 64 x 30000 (few
long rows), forward and backward: as torch does them; short rows as a product with ones; long rows
in two steps; compiled by inductor. Prints milliseconds, medians in turns, and how far results are
off, in parts of the largest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial

import click
import pandas as pd
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

SHAPES = (750_000, 32), (64, 30_000)
TURNS = 7


def product(x: Tensor) -> Tensor:
    return x @ torch.ones(x.shape[1], dtype=x.dtype, device=x.device)


def two_steps(x: Tensor, parts: int) -> Tensor:
    return x.view(len(x), parts, -1).sum(2).sum(1)


def own_softmax(x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    powers = (x - x.amax(1, keepdim=True)).exp()
    return powers / total(powers)[:, None]


def ways(shape: tuple[int, int]) -> Mapping[str, Mapping[str, Callable[[Tensor], Tensor]]]:
    """By what is computed: `torch`, and others."""
    parts = math.gcd(shape[1], 100)
    others: dict[str, Callable[[Tensor], Tensor]] = {
        "product": product,
        "two steps": partial(two_steps, parts=parts),
    }
    if parts < 10:
        del others["two steps"]

    def plain_sum(x: Tensor) -> Tensor:
        return x.sum(1)

    def plain_softmax(x: Tensor) -> Tensor:
        return x.softmax(1)

    sums = {"torch": plain_sum, **others}
    softmaxes = {"torch": plain_softmax}
    softmaxes |= {way: partial(own_softmax, total=total) for way, total in others.items()}
    found: dict[str, Mapping[str, Callable[[Tensor], Tensor]]] = {}
    for name, own in (("sum", sums), ("softmax", softmaxes)):
        found[name] = {**own, "inductor": torch.compile(own["torch"], dynamic=False)}
    return found


def learn(way: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(way(x), x, gradient)
    return found


@click.command()
@click.option("--threads", default=1, show_default=True)
@click.option("--device", default="cpu", show_default=True)
def main(threads: int, device: str) -> None:
    torch.set_num_threads(threads)
    rows = []
    for shape in SHAPES:
        x = torch.randn(shape, device=device, requires_grad=True)
        for name, own in ways(shape).items():
            right = own["torch"](x)
            gradient = torch.randn_like(right)
            seconds: dict[str, list[float]] = {way: [] for way in own}
            for _ in range(TURNS):
                for way, run in own.items():
                    given = {"learn": learn, "run": run, "x": x, "g": gradient}
                    timer = Timer("learn(run, x, g)", globals=given, num_threads=threads)
                    seconds[way].append(timer.timeit(3).mean)
            for way, run in own.items():
                off = float((run(x) - right).abs().max() / right.abs().max())
                took = 1e3 * statistics.median(seconds[way])
                rows.append({"shape": shape, "what": name, "way": way, "ms": took, "off": off})
    print(pd.DataFrame(rows).to_string(index=False, float_format="%.3g"))


if __name__ == "__main__":
    main()
