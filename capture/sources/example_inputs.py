"""Example inputs from a text such as `3x224x224` or `128:int64:50257`."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from pipedream.graph.errors import UserError

_SPEC = re.compile(r"(\d+(?:x\d+)*)?(?::([a-z]+\d*)(?::(\d+))?)?")


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
