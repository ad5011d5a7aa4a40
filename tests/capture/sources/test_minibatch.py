"""Examples of a dataset as one minibatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from pipedream.capture.sources.minibatch import minibatch
from pipedream.graph.errors import UserError

ROWS = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))


def test_a_tuple_of_inputs_and_the_target() -> None:
    examples: Any = [(torch.tensor([float(index)]), index) for index in range(3)]
    (x,), target = minibatch(examples, [2, 0], torch.float64)
    assert x.dtype == torch.float64
    assert (x.flatten().tolist(), target.tolist()) == ([2.0, 0.0], [2, 0])


class OneByOne:
    """The same examples, none of its rows known to be tensors."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@pytest.mark.parametrize("rows", [ROWS, Subset(ROWS, [5, 3, 1]), Subset(Subset(ROWS, [4, 2]), [1])])
def test_rows_of_tensors_are_taken_all_at_once(rows: Any) -> None:
    indices = [len(rows) - 1, 0, -1]
    (x,), target = minibatch(rows, indices, torch.float16)
    (expected,), known = minibatch(OneByOne(rows), indices, torch.float16)
    assert torch.equal(x, expected)
    assert torch.equal(target, known)
    assert (x.dtype, target.dtype) == (expected.dtype, known.dtype)


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_a_subset_by_a_tensor_or_an_array(kind: Callable[[list[int]], Any]) -> None:
    """As of `torch.randperm`: its numbers, tensors themselves, were taken for several indices."""
    (x,), target = minibatch(Subset(ROWS, kind([5, 3, 1])), [0, 2], torch.float32)
    assert x.tolist() == [[10.0, 11.0], [2.0, 3.0]]
    assert target.tolist() == [5, 1]


def test_a_dataset_of_a_kind_of_its_own_is_asked_itself() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return 2 * x, y

    (x,), _ = minibatch(Doubled(*ROWS.tensors), [1], torch.float32)
    assert x.tolist() == [[4.0, 6.0]]


def test_what_gives_many_at_once_is_asked_once() -> None:
    asked: list[Sequence[int]] = []

    class Many(OneByOne):
        def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
            asked.append(indices)
            return [self.rows[index] for index in indices]

    (x,), _ = minibatch(Many(ROWS), [3, 2], torch.float32)
    assert asked == [[3, 2]]
    assert x.tolist() == [[6.0, 7.0], [4.0, 5.0]]


def test_rows_that_are_no_pairs() -> None:
    with pytest.raises(UserError, match=r"an example is a tuple of 1: give \(input, ..., target\)"):
        minibatch(TensorDataset(torch.zeros(3)), [0], torch.float32, "mine:data")
    with pytest.raises(UserError, match="mine:data: IndexError"):
        minibatch(ROWS, [6], torch.float32, "mine:data")
