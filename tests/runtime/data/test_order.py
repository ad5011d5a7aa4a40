"""Samplers: which examples come in which order, on whatever rank and in a resumed run."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, Sampler

from pipedream.graph.errors import UserError
from pipedream.graph.run_config import DataFactory, Factory, RunConfig
from pipedream.runtime.data.order import EpochOrder, Sizes
from pipedream.runtime.data.reader import Epoch

HERE = __name__
DATA = list(range(20))


class Drawing(Sampler[int]):
    """Draws from all the global random numbers, and from the epoch that it is told."""

    def __init__(self, dataset: list[int]) -> None:
        self.dataset, self.epoch = dataset, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        draws = random.random() + np.random.rand() + float(torch.rand(()))
        begin = int(draws * 1000) + self.epoch
        return iter([(begin + index) % len(self.dataset) for index in range(16)])


class Growing(Drawing):
    def __init__(self, dataset: list[int], first: int = 4, step: int = 4) -> None:
        super().__init__(dataset)
        self.first, self.step = first, step

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first + self.step * self.epoch))


def by_the_clock() -> list[int]:
    return [time.perf_counter_ns() // 7 % 20 for _ in range(20)]


def in_batches() -> list[list[int]]:
    return [[0, 1], [2, 3]]


def of_two(dataset: list[int]) -> Sampler[int]:
    return torch.utils.data.DistributedSampler(dataset, num_replicas=2, rank=0)


def nothing() -> None:
    return None


def order(source: str, seed: int = 0, drop_last: bool = False, **args: object) -> EpochOrder:
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="mine:model"),
        data=DataFactory(source="mine:data"),
        sampler=Factory(source=source if ":" in source else f"{HERE}:{source}", args=args),
        batch_size=4,
        drop_last=drop_last,
        seed=seed,
    )
    return EpochOrder(DATA, config, Path())


TORCH = "torch.utils.data"


@pytest.mark.parametrize(
    ("source", "args"),
    [
        (f"{TORCH}:RandomSampler", {"replacement": True, "num_samples": 12}),
        (f"{TORCH}:WeightedRandomSampler", {"weights": [1.0, *[0.1] * 19], "num_samples": 12}),
        (f"{TORCH}:DistributedSampler", {}),
        (f"{TORCH}:SubsetRandomSampler", {"indices": [3, 5, 8, 9]}),
        ("Drawing", {}),
    ],
)
def test_every_rank_has_the_same_order_and_every_epoch_its_own(source, args):
    here, there = order(source, **args), order(source, **args)
    torch.rand(3)  # another rank may have drawn more
    assert [here(1), here(2)] == [there(1), there(2)]
    assert there(2) == here(2), "whether or not epoch 1 was there before"
    assert here(1) != here(2)
    assert here(1) != order(source, seed=1, **args)(1) or "Distributed" in source


def test_nobody_elses_random_numbers_change():
    sampler = order("Drawing")
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = torch.rand(()), random.random(), np.random.rand()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    sampler(5)
    assert (torch.rand(()), random.random(), np.random.rand()) == expected


def test_the_weights_count():
    """Example 0 comes as often as it weighs, with torch's own sampler as the reference."""
    weights = [1.0] + [0.0] * 19
    found = order(f"{TORCH}:WeightedRandomSampler", weights=weights, num_samples=8)
    assert found(1) == [0] * 8
    assert found.sizes.examples == 8


def test_it_is_the_sampler_itself_that_draws():
    generator = torch.Generator().manual_seed(7 * 1_000_003 + 2)
    assert order(f"{TORCH}:RandomSampler", seed=7)(2) == list(
        RandomSampler(DATA, generator=generator)
    )


@pytest.mark.parametrize(
    ("source", "args", "says"),
    [
        ("by_the_clock", {}, "gives another order when it is made again"),
        ("in_batches", {}, r"gives \[0, 1\], which is not a valid index \(0 to 19\)"),
        ("of_two", {}, "num_replicas is 2: .* write 1"),
        ("nothing", {}, "returns a NoneType, which is not iterable over indices"),
        (f"{TORCH}:SubsetRandomSampler", {"indices": [20]}, "gives 20, which is not a valid index"),
        (f"{TORCH}:RandomSampler", {"sample": 3}, "its signature is RandomSampler"),
    ],
)
def test_what_cannot_be_is_refused(source, args, says):
    with pytest.raises(UserError, match=says):
        order(source, **args)


def test_every_epoch_has_as_many_minibatches_of_the_same_sizes():
    growing = order("Growing")
    with pytest.raises(UserError, match="8 examples in epoch 1, 4 in the first"):
        growing(1)
    by_one = order("Growing", first=5, step=1)
    with pytest.raises(UserError, match=r"6 examples in epoch 1, 5 in the first.* drop_last: true"):
        by_one(1)
    assert len(order("Growing", drop_last=True, first=5, step=1)(1)) == 6


COUNTS = st.integers(0, 60), st.integers(1, 20)


@given(*COUNTS)
def test_every_example_has_its_place(examples: int, batch_size: int) -> None:
    sizes = Sizes(examples, batch_size)
    counts = [sizes.of(minibatch) for minibatch in range(len(sizes))]
    assert sum(counts) == examples
    assert set(counts[:-1]) <= {batch_size}
    assert [b for b, count in enumerate(counts) if count < batch_size] == (
        [] if sizes.last is None else [sizes.last]
    )


@given(*COUNTS)
def test_or_what_does_not_fill_a_minibatch_is_left_out(examples: int, batch_size: int) -> None:
    sizes = Sizes(examples, batch_size, drop_last=True)
    counts = [sizes.of(minibatch) for minibatch in range(len(sizes))]
    assert counts == [batch_size] * (examples // batch_size)
    assert sizes.last is None


def test_an_epoch_reads_them_so() -> None:
    """Each of ten examples once; with `drop_last` two sit each epoch out, not always the same."""
    data = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10))
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source="small_models:Chain"),
        data=DataFactory(source="small_models:regression"),
        batch_size=4,
    )

    def read(config: RunConfig, number: int) -> list[list[int]]:
        epoch = Epoch(data, config, number, torch.device("cpu"))
        return [epoch.batch(minibatch).target.tolist() for minibatch in range(len(epoch))]

    kept = [read(config, number) for number in (1, 2)]
    assert [[len(batch) for batch in epoch] for epoch in kept] == [[4, 4, 2]] * 2
    assert [sorted(chain.from_iterable(epoch)) for epoch in kept] == [list(range(10))] * 2
    dropped = [read(config.model_copy(update={"drop_last": True}), number) for number in (1, 2)]
    assert dropped == [epoch[:2] for epoch in kept]
    assert kept[0][2] != kept[1][2]
