"""Examples as the model takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedream.capture.sources.minibatch import Dataset, minibatch, model_inputs
from pipedream.graph.run_config import RunConfig


@dataclass(frozen=True)
class Batch:
    """Examples as the model takes them: each tensor [batch_size, ...].

    With loss `output` the target is the last of the inputs, too.
    """

    inputs: tuple[Tensor, ...]
    target: Any

    @staticmethod
    def of(dataset: Dataset, indices: Iterable[int], config: RunConfig) -> Batch:
        """Raises UserError: see `minibatch`."""
        dtype = getattr(torch, config.dtype)
        inputs, target = minibatch(dataset, indices, dtype, config.data.source)
        return Batch(model_inputs(inputs, target, config.loss), target)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Returns it in page-locked memory, from which a GPU copies while the host goes on.

        torch's DataLoader calls it by this name.
        """
        return self._each(lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in it."""
        leaves = pytree.tree_leaves((self.inputs, self.target))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def first(self, count: int) -> Batch:
        """Returns the first `count` of the examples."""
        return self._each(lambda tensor: tensor[:count].clone())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(*pytree.tree_map_only(Tensor, change, (self.inputs, self.target)))

    @property
    def kind(self) -> str:
        """Shape and type of every input of an example, as text for messages."""
        return ", ".join(f"{list(x.shape[1:])} of {str(x.dtype)[6:]}" for x in self.inputs)
