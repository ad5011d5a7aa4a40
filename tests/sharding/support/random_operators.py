"""Random graphs of operators, for searches that divide them."""

from __future__ import annotations

import random

from pipedream.graph.placements.operators import (
    Argument,
    Input,
    Operator,
    OperatorCall,
    OperatorGraph,
    StageInput,
    StageOutput,
    TensorType,
)


def _float(*shape: int) -> TensorType:
    return TensorType(shape=shape, dtype="float32", element_bytes=4)


def random_graph(rng: random.Random, most: int = 8) -> OperatorGraph:
    """Matrices of 8 x 12 and 12 x 12, added, multiplied, bent and transposed back and forth."""
    inputs = [StageInput(value="x", role="input", name="0", type=_float(8, 12))]
    values, weights, calls = ["x"], [], []
    for number in range(rng.randint(1, 3)):
        weights.append(f"w{number}")
        inputs.append(
            StageInput(value=f"w{number}", role="parameter", name=f"w{number}", type=_float(12, 12))
        )
    for number in range(rng.randint(1, most)):
        kind = rng.choice(("mm", "add", "relu", "neg", "_softmax"))
        reads = [rng.choice(values)]
        rest: tuple[Argument, ...] = ()
        if kind == "mm":
            reads.append(rng.choice(weights))
        if kind == "add":
            reads.append(rng.choice(values))
        if kind == "_softmax":
            rest = (1, False)
        types = [_float(12, 12) if name in weights else _float(8, 12) for name in reads]
        operator = Operator(
            target=f"aten.{kind}.{'Tensor' if kind == 'add' else 'default'}",
            arguments=(*(Input(input=k) for k in range(len(reads))), *rest),
            inputs=tuple(types),
            outputs=(_float(8, 12),),
        )
        calls.append(
            OperatorCall(
                name=f"v{number}", operator=operator, reads=tuple(reads), results=(f"v{number}",)
            )
        )
        values.append(f"v{number}")
    outputs = (StageOutput(value=values[-1], role="output", name="0"),)
    return OperatorGraph(inputs=tuple(inputs), calls=tuple(calls), outputs=outputs)
