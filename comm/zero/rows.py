"""Which part of a tensor belongs to which replica, and tensors laid out part by part.

Each tensor is divided by its elements in their order, whatever its shape: so the parts are even
with one huge parameter, too, and the first replica has a part of every tensor that has elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def part(size: int, replicas: int, replica: int) -> slice:
    """Returns which of `size` elements are this replica's: as many for each, but fewer or none for
    the last.
    """
    width = -(-size // replicas)
    return slice(min(replica * width, size), min((replica + 1) * width, size))


def own_part(tensor: Tensor, replicas: int, replica: int) -> Tensor | None:
    """Returns this replica's part [elements], in the memory of the tensor if that is contiguous;
    None if it has none. A scalar is the first replica's and stays one.
    """
    elements = part(tensor.numel(), replicas, replica)
    if elements.start == elements.stop:
        return None
    return tensor.reshape(-1)[elements] if tensor.dim() else tensor


@dataclass(frozen=True)
class Rows:
    """`matrix` [replicas, columns]: row r has part r of each tensor, at its `columns`, by name."""

    matrix: Tensor
    columns: Mapping[str, slice]

    @staticmethod
    def of(like: Mapping[str, Tensor], names: Sequence[str], replicas: int, more: int = 0) -> Rows:
        """Makes rows of zeros for tensors of these sizes, all of one type, with so many columns
        `more`.
        """
        columns, end = {}, 0
        for name in names:
            columns[name] = slice(end, end + -(-like[name].numel() // replicas))
            end = columns[name].stop
        first = like[names[0]]
        return Rows(
            torch.zeros(replicas, end + more, dtype=first.dtype, device=first.device), columns
        )

    def pairs(self, name: str, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (elements of the matrix, elements of the tensor that belong there), in equal
        shapes. `flat`: the tensor, contiguous [elements].
        """
        columns = self.columns[name]
        width = columns.stop - columns.start
        if not width:
            return
        rows = flat.numel() // width
        yield self.matrix[:rows, columns], flat[: rows * width].view(rows, width)
        if rest := flat.numel() - rows * width:
            yield self.matrix[rows, columns][:rest], flat[rows * width :]

    def own(self, name: str, like: Tensor, replica: int) -> Tensor | None:
        """Returns where the matrix has this replica's part of a tensor such as `like`, in the
        shape of `own_part`.
        """
        elements = part(like.numel(), len(self.matrix), replica)
        count = elements.stop - elements.start
        if not count:
            return None
        there = self.matrix[replica, self.columns[name]][:count]
        return there if like.dim() else there.view(())
