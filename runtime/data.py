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
from pipedream.profiler.source import Dataset, collate, fetch


@dataclass(frozen=True)
class Batch:
    """Examples as the model takes them: each tensor [batch_size, ...], on the device.

    With loss `output` the target is the last of the inputs, too.
    """

    inputs: tuple[Tensor, ...]
    target: Any

    @staticmethod
    def of(
        dataset: Dataset, indices: Iterable[int], config: RunConfig, device: torch.device
    ) -> Batch:
        """Raises UserError, with the user's file and line where the dataset raises something."""
        examples = fetch(dataset, indices, config.data.source)
        made = collate(examples, getattr(torch, config.dtype), config.data.source)
        inputs, target = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), made)
        return Batch((*inputs, target) if config.loss == "output" else tuple(inputs), target)

    @property
    def kind(self) -> str:
        """Shape and type of every input, for a person."""
        return ", ".join(f"{list(x.shape)} of {str(x.dtype)[6:]}" for x in self.inputs)


class Epoch:
    """One pass over a dataset in minibatches of equal size.

    The order depends on the seed and `number` alone, so every rank that needs a minibatch makes it
    for itself: stages that read an input of the model, and the last stage for the target. The
    examples that do not fill a minibatch sit this epoch out; which ones changes with the epoch.
    `kind` is what all minibatches have to be, if that is known: `Batch.kind`.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: RunConfig,
        number: int,
        device: torch.device,
        kind: str | None = None,
    ) -> None:
        self.dataset, self.config, self.device, self.kind = dataset, config, device, kind
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
            batch = Batch.of(self.dataset, chosen, self.config, self.device)
            if batch.kind != (self.kind or batch.kind):
                raise UserError(
                    f"{self.config.data.source}: inputs of minibatch {minibatch} are {batch.kind}, "
                    f"of the first one {self.kind}: all have to have the same shape and type"
                )
            self.last = minibatch, batch
        return self.last[1]


def in_order(dataset: Dataset, config: RunConfig, device: torch.device) -> Iterator[Batch]:
    """All examples of a dataset once, as they come; the last minibatch may be smaller."""
    size = config.batch_size
    for begin in range(0, len(dataset), size):
        yield Batch.of(dataset, range(begin, min(begin + size, len(dataset))), config, device)
