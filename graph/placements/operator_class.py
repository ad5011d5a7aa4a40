"""Classes of operators by what an element of the output needs of the inputs (seed 003).

What has fewer such dependences can be computed where its result is read, without going through
memory. `sharding.operator_class` tells that of an ATen operator; layers of a graph.txt are told by
their names.
"""

from __future__ import annotations

import re
from enum import IntEnum


class OperatorClass(IntEnum):
    """The larger, the more an operator needs."""

    INDEPENDENT = 0
    """Reads no tensor: zeros."""
    ONE_TO_ONE = 1
    """Each element from those at its place: a sum of two tensors, a view."""
    ONE_TO_MANY = 2
    """From a row of elements, or one element for many: a softmax, a norm, a broadcast."""
    COMPLICATED = 3
    """Products of matrices, convolutions, attention, lookups; and all that is not known."""

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", "-")


_NAMES = {
    OperatorClass.ONE_TO_ONE: """
        Abs Add Alias Alphadropout Cat Ceil Celu Chunk Clamp Concat Contiguous Cos Detach Div
        Dropout Dropout1d Dropout2d Dropout3d ELU Elu Erf Exp Flatten Float Floor GELU
        GELUActivation Gelu Hardsigmoid Hardswish Hardtanh Identity Leakyrelu LeakyReLU Log Mish
        Mul Neg NewGELUActivation Permute Pow PReLU QuickGELUActivation Relu ReLU Relu6 ReLU6
        Reshape Rsqrt Select SELU Sigmoid SiLU SiLUActivation Silu Sin Slice Softplus Split Sqrt
        Square Squeeze Stack Sub T Tanh To Transpose Truediv Type Unbind Unflatten Unsqueeze
        View Where __add__ __getitem__ __mul__ __sub__ __truediv__
    """,
    OperatorClass.ONE_TO_MANY: """
        AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d Amax Amin BatchNorm1d BatchNorm2d
        BatchNorm3d Expand GroupNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d LayerNorm
        LayerNorm2d LogSoftmax Logsumexp Mean RMSNorm Repeat Softmax Std Sum Var
    """,
}
_BY_NAME = {name: own for own, names in _NAMES.items() for name in names.split()}
_NAME = re.compile(r"\w+")


def class_of_layer(description: str) -> OperatorClass:
    """That of a layer with such a description, as in graph.txt: `BatchNorm2d(64)`."""
    name = _NAME.match(description)
    return _BY_NAME.get(name[0] if name else "", OperatorClass.COMPLICATED)
