"""What an operator is given, by the names of its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx


def arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Yields what the schema of an operator says of each argument, and the argument, or its
    default.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        for index, argument in enumerate(node.target._schema.arguments):
            if index < len(node.args) and not argument.kwarg_only:
                yield argument, node.args[index]
            else:
                yield argument, node.kwargs.get(argument.name, argument.default_value)


def by_name(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments in their order."""
    return {argument.name: value for argument, value in arguments(node)}
