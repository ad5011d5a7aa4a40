"""Examples whose parts have names, and examples that a function of the user makes a batch of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, default_collate

from pipedream.capture.errors.user_code import accepts, blaming, close_matches, load_function
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import DataFactory

TARGETS = ("labels", "label", "target", "targets", "y")
"""Names by which a target is known if the run config names none."""


@dataclass(frozen=True)
class NamedExamples:
    """A dataset of which `collate` makes minibatches: of named parts those of `inputs`, in that
    order, go to the model, and `target` to the loss. None: parts have no names; there is no target.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    inputs: tuple[str, ...] | None
    target: str | None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def batch(self, indices: Sequence[int], source: str) -> tuple[Any, Any]:
        """The examples at these indices as (inputs, target). Raises UserError."""
        with blaming(source):
            batch = self.collate(read_examples(self.dataset, indices))
        if self.inputs is None:
            return pair(batch, source)
        _check_names(batch, self.inputs, self.target, source)
        target = batch[self.target] if self.target else None
        return tuple(batch[name] for name in self.inputs), target


def read_examples(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """The examples, all at once if the dataset supports that, like torch's DataLoader."""
    if type(dataset) is Subset:
        return read_examples(dataset.dataset, [dataset.indices[i] for i in indices])
    at_once = getattr(dataset, "__getitems__", None)
    return list(at_once(indices)) if at_once else [dataset[index] for index in indices]


def check_example(example: Any, source: str) -> None:
    """Raises UserError unless the example is (input, ..., target)."""
    if not isinstance(example, (tuple, list)) or len(example) < 2:
        many = f" of {len(example)}" if isinstance(example, (tuple, list)) else ""
        raise UserError(
            f"{source}: an example is a {type(example).__name__}{many}: give (input, ..., target),"
            " or a dict"
        )


def pair(parts: Any, source: str) -> tuple[Any, Any]:
    """Inputs and target of an example or a batch whose parts have no names: the target is last."""
    check_example(parts, source)
    *inputs, target = parts
    return inputs[0] if len(inputs) == 1 else tuple(inputs), target


def named_examples(dataset: Any, data: DataFactory, directory: Path) -> Any:
    """The dataset, as NamedExamples if its examples have names or the run config collates them.

    Raises UserError if the names of the run config are not those of the examples.
    """
    own_collate = None if data.collate is None else load_function(data.collate, directory)
    collate: Callable[[list[Any]], Any] = own_collate or default_collate
    with torch.random.fork_rng(devices=[]):  # what it draws is drawn again when it is read
        with blaming(data.source):
            read = read_examples(dataset, [0])
        with blaming(data.collate or data.source):
            first = collate(read) if own_collate or isinstance(read[0], Mapping) else None
    if not isinstance(first, Mapping):
        for option, given in (("inputs", data.inputs), ("target", data.target)):
            if given is not None:
                raise UserError(
                    f"{option}: {given}: the examples of {data.source} have no names: leave it out"
                )
        return dataset if own_collate is None else NamedExamples(dataset, collate, None, None)
    return NamedExamples(dataset, collate, *_chosen(first, data))


def _chosen(first: Mapping[str, Any], data: DataFactory) -> tuple[tuple[str, ...], str | None]:
    """The names of the inputs and of the target."""
    _check_names(first, data.inputs or (), data.target, data.source)
    target = data.target or next((name for name in TARGETS if name in first), None)
    parts = (name for name, value in first.items() if isinstance(value, Tensor))
    return tuple(data.inputs or (name for name in parts if name != target)), target


def _check_names(
    parts: Mapping[str, Any], inputs: Sequence[str], target: str | None, source: str
) -> None:
    for name in (*inputs, *([target] if target else [])):
        if name not in parts:
            raise UserError(
                f"{source}: an example has no {name!r}, only {', '.join(map(str, parts))}"
                + close_matches(name, map(str, parts))
            )


def input_names(dataset: Any, loss: str) -> tuple[str, ...] | None:
    """What the model's inputs are called, in their order; None if they have no names."""
    names = getattr(dataset, "inputs", None)
    if not isinstance(dataset, NamedExamples) or names is None:
        return None
    with_target = loss == "output" and dataset.target is not None
    return (*names, *([dataset.target] if with_target else []))


def bind_inputs(model: nn.Module, names: Sequence[str], source: str, data: str) -> nn.Module:
    """Makes the model take its inputs by position, in this order, or raises UserError."""
    kind = type(model)
    for name in names:
        if not accepts(kind.forward, name):
            raise UserError(
                f"{data}: the examples have {name!r}, which {source} does not take: list those that"
                " it takes as inputs: [...] of the data in the run config"
            )
    order = tuple(names)

    def forward(self: nn.Module, *inputs: Tensor) -> Any:
        return kind.forward(self, **dict(zip(order, inputs, strict=True)))

    # A class of its own and no module around it: parameters keep their names.
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model
