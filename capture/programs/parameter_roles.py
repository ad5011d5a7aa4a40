"""What each parameter of a captured model is for: a weight of a hidden layer, a table, the output.

Optimizers that orthogonalize what they add to a matrix, as Muon does, are for the weights of hidden
layers alone, and leave tables, the output, biases and norms to another (Jordan and others: Muon, an
optimizer for hidden layers in neural networks, 2024). Roles follow from what operators do with a
parameter, not from its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from enum import Enum
from operator import attrgetter, getitem

import torch
from torch import fx

from pipedream.capture.captured import Captured


class Role(Enum):
    """What a parameter is, in words."""

    HIDDEN = "a weight of a hidden layer"
    TABLE = "a table"
    OUTPUT = "the output"
    TIED = "a table and the output"
    OTHER_MATRIX = "in no product"
    NO_MATRIX = "no matrix"

    @property
    def is_matrix(self) -> bool:
        return self is not Role.NO_MATRIX


_PRODUCTS = frozenset(
    (
        *("linear", "mm", "addmm", "matmul", "bmm", "baddbmm", "addbmm", "einsum", "tensordot"),
        *("mv", "addmv", "inner", "chain_matmul", "linalg_multi_dot", "_scaled_mm"),
    )
)
_RECURRENT = frozenset(
    (
        *("lstm", "gru", "rnn_tanh", "rnn_relu"),
        *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    )
)
_LOOKUPS = frozenset(
    (
        *("embedding", "embedding_bag", "_embedding_bag", "embedding_renorm_"),
        *("index", "index_select", "gather", "take", "take_along_dim"),
    )
)
_SAME = frozenset(
    (
        *("to", "_to_copy", "type_as", "clone", "contiguous", "alias", "detach", "lift_fresh"),
        *("view", "view_as", "reshape", "reshape_as", "_unsafe_view", "flatten", "unflatten"),
        *("t", "numpy_T", "mT", "transpose", "swapaxes", "swapdims", "permute", "movedim"),
        *("expand", "expand_as", "squeeze", "unsqueeze", "dropout", "slice", "select", "narrow"),
        *("chunk", "split", "split_with_sizes", "unbind", "tensor_split"),
    )
)
"""Their results are the matrix, or parts of it, in another form."""


def roles(captured: Captured) -> dict[str, Role]:
    """Returns the role of each parameter of the captured model, by its name.

    A matrix has two dimensions and real elements. `TABLE`: operators look rows up in it; `OUTPUT`:
    a factor of a product from which no other product, recurrent layer or convolution with a
    parameter follows, of which a model with several heads has several; `HIDDEN`: a factor of any
    other product, or of a recurrent layer; `OTHER_MATRIX`: neither.
    """
    uses = _Uses(captured.module)

    def role(name: str, parameter: torch.Tensor) -> Role:
        if not is_matrix(parameter):
            return Role.NO_MATRIX
        if name in uses.tables:
            return Role.TIED if name in uses.outputs else Role.TABLE
        if name in uses.outputs:
            return Role.OUTPUT
        return Role.HIDDEN if name in uses.in_product else Role.OTHER_MATRIX

    return {name: role(name, each) for name, each in captured.module.named_parameters()}


class _Uses:
    """Names of matrices: `tables`, in which rows are looked up; those `in_product`; of these the
    `outputs`.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.tables: set[str] = set()
        self.in_product: set[str] = set()
        last: list[tuple[str, fx.Node]] = []
        weighted: set[fx.Node] = set()
        matrices = {name for name, each in module.named_parameters() if is_matrix(each)}
        for name, reader in _parameters_read(module):
            family = _family(reader)
            is_product = family in _PRODUCTS
            is_factor = is_product or family in _RECURRENT
            if is_factor or "conv" in family:
                weighted.add(reader)
            if name in matrices and family in _LOOKUPS:
                self.tables.add(name)
            if name in matrices and is_factor:
                self.in_product.add(name)
            if name in matrices and is_product:
                last.append((name, reader))
        leading = _leading(module.graph, weighted)
        self.outputs = {name for name, reader in last if reader not in leading}


def _parameters_read(module: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    """Yields names of parameters with what reads them."""
    names = {id(each): name for name, each in module.named_parameters()}
    for node in module.graph.find_nodes(op="get_attr"):
        name = names.get(id(attrgetter(node.target)(module)))
        if name is not None:
            yield from ((name, reader) for reader in _readers(node))


def _leading(graph: fx.Graph, weighted: AbstractSet[fx.Node]) -> set[fx.Node]:
    """Returns the nodes on which one of those with weights depends."""
    leading: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in weighted or user in leading for user in node.users):
            leading.add(node)
    return leading


def is_matrix(parameter: torch.Tensor) -> bool:
    """Returns whether it has two dimensions and real elements."""
    return parameter.dim() == 2 and parameter.is_floating_point()


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields what reads the value, or the same value in another form."""
    for user in node.users:
        if _family(user) in _SAME or user.target is getitem:
            yield from _readers(user)
        else:
            yield user


def _family(node: fx.Node) -> str:
    """Returns the name of an ATen operator, without overload; "" for anything else."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    space, _, name = node.target._schema.name.partition("::")
    return name if space == "aten" else ""
