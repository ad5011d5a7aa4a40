"""Streams: datasets that can only be read from the beginning, such as torch's IterableDataset.

Every rank that needs examples goes through the whole stream by itself, and a run that goes on in
the middle of an epoch goes through what it has behind it. What a stream draws comes from random
numbers of its own, which depend on the seed of the run and the epoch alone. So all ranks see the
same examples, also in a run that was stopped and resumed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from pipedream.capture.sources.named_examples import NamedExamples
from pipedream.graph.errors import UserError


def is_stream(dataset: Any) -> bool:
    """Whether the dataset can be iterated, and its examples have no indices."""
    if isinstance(dataset, DataLoader):
        return False
    by_index = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return hasattr(dataset, "__iter__") and not by_index


class Stream:
    """The first `count` examples of an epoch of a stream, to be read in their order."""

    def __init__(self, dataset: Any, count: int, seed: int, source: str) -> None:
        self.dataset, self.count, self.seed, self.source = dataset, count, seed, source
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """The next example is the first of the epoch; `set_epoch` of the dataset is called."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        key = self.seed * 1_000_003 + epoch
        self.states: tuple[Any, Any, Any] = (
            random.Random(key).getstate(),
            np.random.RandomState(key % 2**32).get_state(),
            torch.Generator().manual_seed(key % 2**63).get_state(),
        )
        self.examples: Iterator[Any] | None = None
        self.next, self.epoch = 0, epoch

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        (example,) = self.__getitems__([index])
        return example

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Those at these ascending indices; from the beginning again if they are behind it."""
        if indices and indices[0] < self.next:
            self.begin(self.epoch)
        with self._own_random_numbers():
            return [self._read(index) for index in indices]

    def _read(self, index: int) -> Any:
        if index >= self.count:
            raise IndexError(index)
        if self.examples is None:
            self.examples = iter(self.dataset)
        while True:
            try:
                example = next(self.examples)
            except StopIteration:
                raise UserError(
                    f"{self.source}: the stream ends after {self.next} examples, and an epoch is to"
                    f" have {self.count}: write examples: {self.next} for the data"
                ) from None
            self.next += 1
            if self.next > index:
                return example

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        _set(self.states)
        try:
            yield
        finally:
            self.states = random.getstate(), np.random.get_state(), torch.get_rng_state()
            _set(before)


def _set(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def stream_of(dataset: Any) -> Stream | None:
    """The stream that a dataset of a run is, or reads from; None if it has indices."""
    inner = dataset.dataset if isinstance(dataset, NamedExamples) else dataset
    return inner if isinstance(inner, Stream) else None


def examples_of(stream: Any, wanted: int | None, source: str) -> int:
    """Returns the examples of an epoch. Raises UserError if unknown, or readable only once."""
    if hasattr(stream, "__next__"):
        raise UserError(
            f"{source}: the training set is a {type(stream).__name__}, which can be read once only:"
            " return an object with an __iter__ that begins anew, such as an IterableDataset"
        )
    if wanted is not None:
        return wanted
    if not hasattr(stream, "__len__"):
        raise UserError(
            f"{source}: the training set is a stream of unknown length: write examples: N for the"
            " data, the number of examples of an epoch"
        )
    return len(stream)
