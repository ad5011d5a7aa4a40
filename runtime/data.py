"""The minibatches of an epoch: which examples, in which order, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedream.graph.command import UserError
from pipedream.graph.config import RunConfig
from pipedream.profiler.source import Dataset, collate


@dataclass(frozen=True)
class Batch:
    """Examples as the model takes them: each tensor [batch_size, ...], on the device.

    With loss `output` the target is the last of the inputs, too.
    """

    inputs: tuple[Tensor, ...]
    target: Any

    @staticmethod
    def of(examples: list[Any], config: RunConfig, device: torch.device) -> Batch:
        made = collate(examples, getattr(torch, config.dtype), config.data.source)
        inputs, target = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), made)
        return Batch((*inputs, target) if config.loss == "output" else tuple(inputs), target)


class Epoch:
    """One pass over a dataset in minibatches of equal size.

    The order depends on the seed and `number` alone, so every rank that needs a minibatch makes it
    for itself: stages that read an input of the model, and the last stage for the target. The
    examples that do not fill a minibatch sit this epoch out; which ones changes with the epoch.
    """

    def __init__(
        self, dataset: Dataset, config: RunConfig, number: int, device: torch.device
    ) -> None:
        self.dataset, self.config, self.device = dataset, config, device
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
        self.order = torch.randperm(len(dataset), generator=generator).tolist()
        self.last: tuple[int, Batch] | None = None

    def __len__(self) -> int:
        """The number of minibatches."""
        return len(self.dataset) // self.config.batch_size

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[Tensor]:
        """The model's input tensors at these positions. Raises UserError if one is missing."""
        wanted = list(which)
        if not wanted:
            return []
        tensors = self.batch(minibatch).inputs
        if max(wanted) >= len(tensors):
            raise UserError(
                f"the model takes {max(wanted) + 1} inputs and the data gives {len(tensors)}"
            )
        return [tensors[position] for position in wanted]

    def target(self, minibatch: int) -> Any:
        return self.batch(minibatch).target

    def batch(self, minibatch: int) -> Batch:
        """The last one made is kept: a stage may read the inputs and then the target."""
        if self.last is None or self.last[0] != minibatch:
            size = self.config.batch_size
            chosen = self.order[minibatch * size : (minibatch + 1) * size]
            examples = [self.dataset[index] for index in chosen]
            self.last = minibatch, Batch.of(examples, self.config, self.device)
        return self.last[1]


def in_order(dataset: Dataset, config: RunConfig, device: torch.device) -> Iterator[Batch]:
    """All examples of a dataset once, as they come; the last minibatch may be smaller."""
    size = config.batch_size
    for begin in range(0, len(dataset), size):
        indices = range(begin, min(begin + size, len(dataset)))
        yield Batch.of([dataset[index] for index in indices], config, device)
