"""A few numbers that tell by how much two tensors differ, though they are on different ranks.

Random projections (Johnson and Lindenstrauss, 1984): for a vector of random signs s, the mean
square of s.(a - b) is the squared norm of a - b. The signs of an element are the product of one by
its column and one by its row, as in a tensor sketch, so that few are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pipedream.capture.checks.equivalence import as_double

Fingerprint: TypeAlias = Sequence[float]
"""The norm of a tensor, then its projections."""

_PROJECTIONS = 12
"""Their mean square is less than a tenth of what it stands for once in a hundred million times."""

_COLUMNS = 1021
_ROWS = 4096
"""How many rows of so many columns are looked at together."""


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Returns that of a tensor of any shape and type; infinities and nan count as zero."""
    flat = as_double(tensor).reshape(-1)
    total = torch.zeros(_PROJECTIONS, dtype=torch.float64, device=flat.device)
    squares, generator = 0.0, torch.Generator().manual_seed(0)
    columns = _signs(_COLUMNS, generator).to(flat.device)
    for chunk in torch.split(flat, _COLUMNS * _ROWS):
        chunk = chunk.nan_to_num(0.0, 0.0, 0.0)
        padded = torch.nn.functional.pad(chunk, (0, -len(chunk) % _COLUMNS)).view(-1, _COLUMNS)
        rows = _signs(len(padded), generator).to(flat.device)
        total += ((padded @ columns) * rows).sum(0)
        squares += float(chunk.square().sum())
    return [math.sqrt(squares), *total.tolist()]


def apart(one: Fingerprint, other: Fingerprint) -> float:
    """Returns about the norm of the difference of the two tensors."""
    pairs = zip(one[1:], other[1:], strict=True)
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs) / _PROJECTIONS)


def _signs(count: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(0, 2, (count, _PROJECTIONS), generator=generator)
    return (2 * drawn - 1).double()
