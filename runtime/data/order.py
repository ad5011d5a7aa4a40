"""Which examples an epoch has, in which order: the same on every rank, and in a resumed run."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data.distributed import DistributedSampler

from pipedream.capture.errors.user_code import accepts, blaming, call, load_function
from pipedream.capture.sources.minibatch import Dataset
from pipedream.capture.sources.streams import stream_of
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import Factory, RunConfig


@dataclass(frozen=True)
class Sizes:
    """Minibatches of `batch_size` of the examples; with `drop_last` the rest is skipped.

    Every rank knows them before it begins, so no shapes are sent between ranks.
    """

    examples: int
    batch_size: int
    drop_last: bool = False

    def __len__(self) -> int:
        """The number of minibatches."""
        return self.examples // self.batch_size + bool(self.rest)

    @property
    def rest(self) -> int:
        """The examples of the last minibatch where they are fewer than `batch_size`; else 0."""
        return 0 if self.drop_last else self.examples % self.batch_size

    @property
    def last(self) -> int | None:
        """The number of the minibatch that is smaller than the others, if there is one."""
        return len(self) - 1 if self.rest else None

    def of(self, minibatch: int) -> int:
        return self.rest if minibatch == self.last else self.batch_size


class EpochOrder:
    """`order(number)` returns the indices of an epoch's examples, by the seed and the number alone.

    Without a sampler all examples in a random order, those of a stream in its own. A sampler is
    made anew for each epoch, with the training set as `dataset` or `data_source` and a seeded
    `generator`, if it takes them, and told the epoch with `set_epoch`, if it has that; the random
    numbers of torch, numpy and Python are seeded for it, too. Raises UserError if it gives another
    order when asked again.
    """

    def __init__(self, dataset: Dataset, config: RunConfig, directory: Path) -> None:
        self.dataset, self.config, self.directory = dataset, config, directory
        self.is_stream = stream_of(dataset) is not None
        if self.is_stream and config.sampler is not None:
            raise UserError(
                f"sampler {config.sampler.source}: {config.data.source} gives a stream, whose"
                " examples come in their own order: leave the sampler out"
            )
        first = self(0)
        if config.sampler is not None and self(0) != first:
            raise UserError(
                f"sampler {config.sampler.source}: it gives another order when it is made again, "
                "so ranks would disagree: draw from the generator it is given, or from torch's, "
                "numpy's or Python's own random numbers"
            )
        self.sizes = self._sizes(len(first))

    def __call__(self, epoch: int) -> list[int]:
        sampler, seed = self.config.sampler, _seed(self.config.seed, epoch)
        if self.is_stream:
            return list(range(len(self.dataset)))
        if sampler is None:
            return shuffled(len(self.dataset), self.config.seed, epoch)
        generator = torch.Generator().manual_seed(seed)
        states = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[]), blaming(f"sampler {sampler.source}"):
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed % 2**32)
                indices = self._make(sampler, generator)
                if hasattr(indices, "set_epoch"):
                    indices.set_epoch(epoch)
                return self._checked(list(indices), epoch)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])

    def _make(self, sampler: Factory, generator: torch.Generator) -> Iterable[Any]:
        source = f"sampler {sampler.source}"
        factory = load_function(sampler.source, self.directory)
        # A pipeline reads its data as one: its ranks know themselves which minibatches are theirs.
        offered = {
            "dataset": self.dataset,
            "data_source": self.dataset,
            "generator": generator,
            "num_replicas": 1,
            "rank": 0,
        }
        known = {name: value for name, value in offered.items() if accepts(factory, name)}
        indices = call(source, factory, {**known, **sampler.args})
        if isinstance(indices, DistributedSampler) and indices.num_replicas != 1:
            raise UserError(
                f"{source}: num_replicas is {indices.num_replicas}: the ranks deal out the "
                "minibatches themselves, so write 1"
            )
        if not isinstance(indices, Iterable):
            raise UserError(
                f"{source} returns a {type(indices).__name__}, which is not iterable over indices"
            )
        return indices

    def _checked(self, indices: Sequence[Any], epoch: int) -> list[int]:
        assert self.config.sampler is not None
        source, count = self.config.sampler.source, len(self.dataset)
        for index in indices:
            if not isinstance(index, (int, np.integer)) or not 0 <= index < count:
                raise UserError(
                    f"sampler {source}: gives {index!r}, which is not a valid index "
                    f"(0 to {count - 1})"
                )
        sizes = self._sizes(len(indices))
        expected = getattr(self, "sizes", sizes)
        if (len(sizes), sizes.rest) != (len(expected), expected.rest):
            only_rest = len(indices) // sizes.batch_size == expected.examples // sizes.batch_size
            raise UserError(
                f"sampler {source}: {len(indices)} examples in epoch {epoch}, "
                f"{expected.examples} in the first: every epoch has to have as many minibatches "
                "of the same sizes" + "; write drop_last: true" * only_rest
            )
        return [int(index) for index in indices]

    def _sizes(self, examples: int) -> Sizes:
        return Sizes(examples, self.config.batch_size, self.config.drop_last)


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """Returns the numbers below `count` in the order of that epoch."""
    generator = torch.Generator().manual_seed(_seed(seed, epoch))
    return torch.randperm(count, generator=generator).tolist()


def _seed(seed: int, epoch: int) -> int:
    return seed * 1_000_003 + epoch
