"""One way in which a model becomes a graph: torch.export, then one node per innermost module call.

A skeleton of the interface; the body follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from pipedream.graph.model import Graph


@dataclass(frozen=True)
class Value:
    """A tensor of the captured model: made by graph node `node`, called `name` in the fx graph."""

    name: str
    node: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Captured:
    """A training-mode model as a graph of nodes over an fx graph of ATen operators.

    `graph` has the structure and the sizes, no times; ids are node1, node2, ... in the order of
    execution, and the inputs of the model come first as `Input0`, `Input1`, ...
    `module` has one placeholder for each input tensor of the model (inputs flattened), parameters,
    buffers and constants as get_attr under their qualified names, and writes in place to buffers
    only. `owner` gives each fx node (placeholders and operators) its graph node; `values` each
    tensor-valued one its shape. `outputs` are the names of the values the model returns, and
    `rebuild` makes of them the structure that the model returned.
    `parameters` lists for each graph node the qualified names it reads.
    """

    graph: Graph
    module: fx.GraphModule
    owner: Mapping[str, str]
    values: Mapping[str, Value]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    out_spec: Any
    module_paths: Mapping[str, str]
    parameters: Mapping[str, tuple[str, ...]]


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Captured:
    """Captures `model`, in training mode, as it runs on these inputs.

    Raises UserError with the reason where torch.export cannot capture the model.
    """
    raise NotImplementedError
