"""Streams: the same examples for all who read them, however they read them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Drawn
from torch.utils.data import IterableDataset

from pipedream.capture.sources.streams import Stream, examples_of, is_stream
from pipedream.graph.errors import UserError


class Counting(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def read(stream: Stream, *batches: list[int]) -> dict[int, Any]:
    return {
        index: [part.tolist() if torch.is_tensor(part) else part for part in example]
        for batch in batches
        for index, example in zip(batch, stream.__getitems__(batch), strict=True)
    }


def test_who_reads_less_reads_the_same() -> None:
    """A replica reads every other minibatch, a resumed run only the last ones; in between others
    draw random numbers.
    """
    whole = read(Stream(Drawn(), 12, 7, "mine:data"), list(range(12)))
    few = Stream(Drawn(), 12, 7, "mine:data")
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    found = read(few, [2, 3])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    torch.rand(5)
    random.random()
    found |= read(few, [6, 7], [10, 11])
    assert found == {index: whole[index] for index in found}
    assert read(few, [0, 1]) == {index: whole[index] for index in (0, 1)}  # from the beginning


def test_each_epoch_and_each_seed_has_its_own() -> None:
    stream = Stream(Drawn(), 4, 7, "mine:data")
    first = read(stream, [0, 1])
    stream.begin(1)
    second = read(stream, [0, 1])
    assert first != second
    stream.begin(0)
    assert read(stream, [0, 1]) == first
    assert read(Stream(Drawn(), 4, 8, "mine:data"), [0, 1]) != first


def test_a_stream_that_ends_early_is_named() -> None:
    stream = Stream(Counting(5), 8, 0, "mine:data")
    assert stream.__getitems__([0, 1, 2, 3]) == [0, 1, 2, 3]
    with pytest.raises(UserError, match=r"mine:data: the stream ends after 5 examples.*write exam"):
        stream.__getitems__([4, 5])


def test_what_a_stream_is() -> None:
    assert is_stream(Counting(3))
    assert is_stream(iter([1]))
    assert not is_stream([1, 2])
    assert not is_stream(torch.utils.data.DataLoader([1, 2]))
    with pytest.raises(UserError, match="can be read once only"):
        examples_of(iter([1]), 3, "mine:data")
    with pytest.raises(UserError, match="of unknown length"):
        examples_of(Counting(3), None, "mine:data")
    assert examples_of(Counting(3), 2, "mine:data") == 2
