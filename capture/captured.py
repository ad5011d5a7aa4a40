"""A captured model: a graph of nodes, and the operators that each of them runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pipedream.capture.compute_settings import Precision
from pipedream.graph.model import Graph


@dataclass(frozen=True)
class Value:
    """A tensor of the captured model: `name` in the fx graph, computed by graph node `node`.

    `requires_grad`: whether it has a gradient, where all outputs of the model have one. That of
    what is detached afterwards, or of a comparison alone, is none rather than zero: what has made
    it does not learn from it, and an optimizer leaves it as it is.
    """

    name: str
    node: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OutSpec:
    """The structure that a model returns: a pytree, and by index the leaves that are no tensor."""

    tree: pytree.TreeSpec
    fixed: Mapping[int, Any]


@dataclass(frozen=True)
class Captured:
    """A model as a graph of nodes over an fx graph of ATen operators.

    `graph`: structure and sizes, without times. Ids are node1, node2, ... in order of execution;
    the inputs of the model come first, as `Input0`, `Input1`, ...
    `module`: the fx graph, with a placeholder for each input tensor (flattened) and parameters,
    buffers and constants as get_attr under their qualified names. It writes in place only to
    buffers.
    `owner`: the graph node of each fx node (placeholders and operators) except constants, which
    every part of the model computes itself. `values`: each tensor that has an owner.
    `inputs`, `outputs`: names of the values that the model takes and returns; `out_spec`: the
    structure that it returns.
    `module_paths`: the module that each graph node is a call of, or for a functional operator the
    module that calls it. `parameters`: qualified names of the parameters that each node reads.
    `precision`: the one in which the values have the types that `values` says; whoever runs a part
    of the model does so in it.
    """

    graph: Graph
    module: fx.GraphModule
    owner: Mapping[str, str]
    values: Mapping[str, Value]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    out_spec: OutSpec
    module_paths: Mapping[str, str]
    parameters: Mapping[str, tuple[str, ...]]
    precision: Precision

    @property
    def working(self) -> tuple[str, ...]:
        """The graph nodes except inputs, in the order of the graph."""
        return tuple(name for name in self.graph.order if not self.graph.nodes[name].is_input)

    def on_device(
        self, inputs: Sequence[torch.Tensor], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Returns `inputs` of the model (in the order of its own) by name, on the device."""
        return {name: value.to(device) for name, value in zip(self.inputs, inputs, strict=True)}

    @property
    def returning(self) -> str:
        """The last graph node that gives an output of the model."""
        return max((self.owner[name] for name in self.outputs), key=self.graph.order.index)


def leaves_node(node: fx.Node, owner: Mapping[str, str], returned: Collection[str]) -> bool:
    """Tells whether a value is read outside the graph node that computes it, or returned."""
    return node.name in returned or any(
        owner.get(user.name, owner[node.name]) != owner[node.name] for user in node.users
    )


def rebuild(outputs: Sequence[torch.Tensor], out_spec: OutSpec) -> Any:
    """The structure that the model returns, from the tensors named in `Captured.outputs`."""
    tensors, fixed = iter(outputs), out_spec.fixed
    leaves = [
        fixed[index] if index in fixed else next(tensors)
        for index in range(out_spec.tree.num_leaves)
    ]
    return pytree.tree_unflatten(leaves, out_spec.tree)


def flatten_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The input tensors of a call in the order of `Captured.inputs`."""
    leaves, _ = pytree.tree_flatten((args, dict(kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
