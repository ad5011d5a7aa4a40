"""Minibatches: examples of a dataset collated, or random ones from a text such as `3x224x224`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Subset, TensorDataset, default_collate

from pipedream.capture.errors.user_code import blaming
from pipedream.capture.sources.named_examples import (
    NamedExamples,
    check_example,
    pair,
    read_examples,
)
from pipedream.graph.errors import UserError

_SPEC = re.compile(r"(\d+(?:x\d+)*)?(?::([a-z]+\d*)(?::(\d+))?)?")


class Dataset(Protocol):
    """A map-style dataset whose examples are (input or tuple of inputs, target), or (input, ...,
    target), or NamedExamples.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def minibatch(
    dataset: Dataset, indices: Iterable[int], dtype: torch.dtype, source: str = "data"
) -> tuple[tuple[Tensor, ...], Any]:
    """The examples at these indices as (inputs, target), with a tensor [batch, ...] per input.

    They get the type of `in_type`. Raises UserError if an example is not a pair, an input is
    not a tensor, or examples differ in shape; and if the dataset raises an error, with the user's
    file and line.
    """
    inputs, target = pytree.tree_map_only(
        Tensor,
        lambda value: in_type(value, dtype),
        _together(dataset, list(indices), source),
    )
    inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    for value in inputs:
        if not isinstance(value, Tensor):
            raise UserError(
                f"{source}: an input is a {type(value).__name__}: give tensors, arrays or numbers"
            )
    return inputs, target


def in_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a floating-point type; complex numbers with parts of that type. Others stay."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def model_inputs(inputs: tuple[Tensor, ...], target: Any, loss: str) -> tuple[Any, ...]:
    """What the model is called with: with loss `output` the target is the last input, too."""
    return (*inputs, target) if loss == "output" and target is not None else inputs


def _together(dataset: Any, indices: Sequence[int], source: str) -> Any:
    """The unchecked pair of inputs and target."""
    if type(dataset) is Subset:
        return _together(dataset.dataset, [dataset.indices[i] for i in indices], source)
    if isinstance(dataset, NamedExamples):
        return dataset.batch(indices, source)
    with blaming(source):
        # Reading one by one would hold the GIL, which the passes of other threads need.
        if type(dataset) is TensorDataset and len(dataset.tensors) > 1:
            return pair(dataset[torch.as_tensor(indices)], source)
        read = read_examples(dataset, indices)
    check_example(read[0], source)
    try:
        return pair(default_collate(read), source)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"{source}: examples do not form a batch: {error}") from error


def example(text: str, batch_size: int, bound: int = 2) -> Tensor:
    """A tensor [batch_size, *shape] for `SHAPE[:DTYPE[:BOUND]]`, with SHAPE as in `3x224x224`.

    Floating-point values are standard normal, integers uniform in 0..BOUND-1. DTYPE defaults to
    float32, BOUND to `bound`: 0 and 1 are valid indices into any embedding. An empty SHAPE gives
    [batch_size]. Raises UserError.
    """
    match = _SPEC.fullmatch(text)
    if match is None or not text:
        raise UserError(f"--input {text}: write 3x224x224, 128:int64 or 128:int64:50257")
    shape, name, limit = match.groups()
    dtype = getattr(torch, name or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"--input {text}: torch has no dtype {name!r}; write float32 or int64")
    size = (batch_size, *(int(part) for part in (shape or "").split("x") if part))
    return _random(size, dtype, int(limit) if limit else bound)


def examples(texts: Iterable[str], batch_size: int, bound: int = 2) -> tuple[Tensor, ...]:
    return tuple(example(text, batch_size, bound) for text in texts)


def _random(size: tuple[int, ...], dtype: torch.dtype, bound: int) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(size, dtype=dtype, device="cpu")
    top = 2 if dtype is torch.bool else max(bound, 1)
    return torch.randint(0, top, size, device="cpu").to(dtype)
