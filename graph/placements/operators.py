"""The operators of a stage, and the values that pass between them, as plain data. No torch.

An `Operator` has no name: two layers of the same size are calls of the same operators. So what is
known of an operator (its strategies, later its times) is known of all its calls. Its inputs are
numbered in the order in which its arguments have them. `aten.addmm.default` of a bias, a matrix and
a transposed weight:

    arguments  Input(0), Input(1), Input(2)
    inputs     float32 (4,)   float32 (5, 6)   float32 (6, 4)
    outputs    float32 (5, 4)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipedream.graph.command import write_whole
from pipedream.graph.errors import ArtifactModel, read_artifact
from pipedream.graph.placements.placement import parse_placements


class TensorType(ArtifactModel):
    """Holds the type of a tensor, whatever its values."""

    shape: tuple[NonNegativeInt, ...]
    dtype: str
    """As torch calls it: float32."""
    element_bytes: PositiveInt
    order: tuple[NonNegativeInt, ...] = ()
    """Its dimensions as they lie in memory, the outermost first; empty as they are counted. Known
    of what an operator reads: a product with a transposed matrix takes another time.
    """

    @field_validator("order")
    @classmethod
    def _check_order(cls, order: tuple[int, ...], fields: ValidationInfo) -> tuple[int, ...]:
        if order and sorted(order) != list(range(len(fields.data.get("shape", ())))):
            raise ValueError(f"{list(order)}: write each dimension of the shape once")
        return order

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes


class Input(ArtifactModel):
    """Stands, among the arguments, for the tensor with this number among the operator's inputs."""

    input: NonNegativeInt


class Special(ArtifactModel):
    """Stands, among the arguments, for what JSON has no word for."""

    kind: Literal["dtype", "layout", "device", "memory_format", "float"]
    name: str
    """As torch calls it: float32, strided, cpu, channels_last; inf, -inf or nan."""


Scalar: TypeAlias = bool | int | float | str | Input | Special | None
Argument: TypeAlias = Scalar | tuple[Scalar, ...]


class Way(ArtifactModel):
    """A way in which the devices of one mesh axis can divide an operator: the placement of each of
    its inputs and outputs, such as `S(0)`, `P` or `R`.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @field_validator("inputs", "outputs")
    @classmethod
    def _check(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            if len(parse_placements(text)) != 1:
                raise ValueError(f"{text!r}: write one placement, such as S(0)")
        return texts


class Operator(ArtifactModel):
    """An ATen operator, its arguments and the types of its inputs and outputs."""

    target: str
    """Its full name: aten.mm.default."""
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...] = ()
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType | None, ...]
    """None for an output that is not computed, such as a gradient that nobody wants."""
    writes: tuple[NonNegativeInt, ...] = ()
    """The numbers of the inputs that it changes, such as the statistics of batch norm."""
    ways: tuple[Way, ...] = ()
    """How it can be divided, as was found by running it: of one that no rule knows."""

    @property
    def family(self) -> str:
        """Returns the target without its overload: aten.mm."""
        return self.target.rpartition(".")[0]

    @property
    def output(self) -> TensorType:
        """Returns the type of its only output."""
        (output,) = self.outputs
        assert output is not None, self.target
        return output

    @property
    def stays(self) -> tuple[int, ...]:
        """The inputs that it must find as they are: those that it writes, and a workspace, whose
        format only the operator that left it knows.
        """
        own = (len(self.inputs) - 1,) if self.family == "aten.mkldnn_rnn_layer_backward" else ()
        return (*self.writes, *own)

    def argument(self, position: int, default: Argument = None) -> Argument:
        """Returns the positional argument, or the default where it is left out."""
        return self.arguments[position] if position < len(self.arguments) else default

    def integer(self, position: int, default: int = 0) -> int:
        value = self.argument(position, default)
        assert isinstance(value, int), (self.target, position, value)
        return value

    def integers(self, position: int, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        value = self.argument(position, default)
        assert isinstance(value, tuple), (self.target, position, value)
        numbers = tuple(each for each in value if isinstance(each, int))
        assert len(numbers) == len(value), (self.target, position, value)
        return numbers

    def input_at(self, position: int) -> int | None:
        """Returns the number of the input at this argument; None if there is no tensor."""
        value = self.argument(position)
        return value.input if isinstance(value, Input) else None

    def with_arguments(self, changed: dict[int, Argument]) -> Operator:
        """Returns the operator with other positional arguments at these positions."""
        if not changed:
            return self
        arguments = list(self.arguments)
        for position, value in changed.items():
            arguments[position] = value
        return self.model_copy(update={"arguments": tuple(arguments)})


class OperatorCall(ArtifactModel):
    """An operator of a graph, the values that it reads and those that it computes."""

    name: str
    operator: Operator
    reads: tuple[str, ...]
    """Its inputs; a value may be read several times."""
    results: tuple[str | None, ...]
    """Its outputs; None for one that is not computed or that nobody reads."""


class StageInput(ArtifactModel):
    """A value that the graph is given."""

    value: str
    role: Literal["parameter", "buffer", "input", "tangent", "draw", "constant"]
    """tangent: the gradient of an output. draw: random numbers. constant: the same in each pass."""
    name: str
    """Of a parameter or buffer its name in the model, else its number among those of its role."""
    type: TensorType


class StageOutput(ArtifactModel):
    """A value that the graph computes."""

    value: str
    role: Literal["output", "input gradient", "parameter gradient"]
    name: str
    """Of the parameter; else the number of the output, or of the input."""


class OperatorGraph(ArtifactModel):
    """The operators of a stage's passes, each after those whose values it reads."""

    inputs: tuple[StageInput, ...]
    calls: tuple[OperatorCall, ...]
    outputs: tuple[StageOutput, ...] = Field(default=())

    def types(self) -> dict[str, TensorType]:
        """Returns the types of all values by name."""
        types = {each.value: each.type for each in self.inputs}
        for call in self.calls:
            for value, type_ in zip(call.results, call.operator.outputs, strict=True):
                if value is not None:
                    assert type_ is not None, call
                    types[value] = type_
        return types

    def backward_calls(self) -> frozenset[str]:
        """Returns the names of the calls that compute from the gradients of outputs."""
        known = {each.value for each in self.inputs if each.role == "tangent"}
        calls = set()
        for call in self.calls:
            if not known.isdisjoint(call.reads):
                calls.add(call.name)
                known.update(value for value in call.results if value is not None)
        return frozenset(calls)


def flops(operator: Operator) -> float:
    """Multiplications and additions of a matrix product, convolution or attention; 0 for others,
    whose time is that of their bytes.
    """
    shapes = [each.shape for each in operator.inputs]
    match operator.family:
        case "aten.mm" | "aten.addmm" | "aten.bmm" | "aten.baddbmm":
            left, right = shapes[-2:]
            return 2.0 * math.prod(left) * right[-1]
        case "aten.convolution" | "aten.convolution_backward":
            backward = operator.family.endswith("_backward")
            weight = shapes[2 if backward else 1]
            result = (
                shapes[0] if backward or operator.outputs[0] is None else operator.outputs[0].shape
            )
            return (4.0 if backward else 2.0) * math.prod(result) * math.prod(weight[1:])
        case "aten.mkldnn_rnn_layer" | "aten.mkldnn_rnn_layer_backward":
            steps, weights = math.prod(shapes[0][:-1]), math.prod(shapes[1]) + math.prod(shapes[2])
            return (4.0 if operator.family.endswith("_backward") else 2.0) * steps * weights
    if operator.family.startswith("aten._scaled_dot_product"):
        query, key = shapes[1:3] if operator.family.endswith("_backward") else shapes[:2]
        factor = 10.0 if operator.family.endswith("_backward") else 4.0
        return factor * math.prod(query) * key[-2]
    return 0.0


def estimated_seconds(graph: OperatorGraph, flops_per_second: float | None) -> dict[str, float]:
    """Returns the seconds by the name of a call, of those with `flops`; nothing if the rate is
    unknown.

    Whoever divides the operators of a plan estimates them so, to come to the same result.
    """
    if flops_per_second is None:
        return {}
    counts = {call.name: flops(call.operator) for call in graph.calls}
    return {name: count / flops_per_second for name, count in counts.items() if count}


def flops_of(graph: OperatorGraph) -> float:
    """Returns the `flops` of all calls."""
    return sum(flops(call.operator) for call in graph.calls)


class TimedOperator(ArtifactModel):
    """An operator and what it takes by itself on one device."""

    operator: Operator
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class OperatorProfile(ArtifactModel):
    """operators.json: the operators of a whole model's passes, and of which node each is."""

    format: Literal["pipedream-operators/1"] = "pipedream-operators/1"
    fingerprint: str
    """Of the model graph: `Graph.fingerprint`."""
    batch_size: PositiveInt | None = None
    graph: OperatorGraph
    """Of one minibatch, as if the model were one stage, which ends in the loss if there is one."""
    nodes: dict[str, str]
    """By the name of a call the node of graph.txt that it belongs to, backward pass included."""
    seconds: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default={})
    """By the name of a call, on one device; those of a node add up to its passes in graph.txt."""
    local_seconds: tuple[TimedOperator, ...] = Field(default=())
    """Of what devices have of divided operators, and of the whole ones timed in the same way: their
    ratios tell what dividing saves. Empty with `pd-profile --shards none`.
    """
    undivided: dict[str, str] = Field(default={})
    """By target, of operators that no rule knows: why no way to divide them was found."""

    @model_validator(mode="after")
    def _check(self) -> OperatorProfile:
        _check_values(self.graph)
        calls = {call.name for call in self.graph.calls}
        for what, known in (("nodes", self.nodes), ("seconds", self.seconds)):
            if unknown := next((name for name in known if name not in calls), None):
                raise ValueError(f"{what}: there is no operator {unknown}")
        if missing := next((name for name in calls if name not in self.nodes), None):
            raise ValueError(f"nodes: {missing} belongs to none")
        timed = set[Operator]()
        for number, each in enumerate(self.local_seconds):
            _check_arguments(f"local_seconds.{number}", each.operator)
            if each.operator in timed:
                raise ValueError(f"local_seconds.{number}: {each.operator.target} is there twice")
            timed.add(each.operator)
        return self


def _check_values(graph: OperatorGraph) -> None:
    """Raises ValueError unless each value is computed once and before it is read."""
    known, names = set[str](), set[str]()
    for each in graph.inputs:
        _add(each.value, known)
    for call in graph.calls:
        _add(call.name, names)
        _check_call(call, known)
        for value in call.results:
            if value is not None:
                _add(value, known)
    if unknown := next((each.value for each in graph.outputs if each.value not in known), None):
        raise ValueError(f"outputs: there is no value {unknown}")


def _add(name: str, names: set[str]) -> None:
    if name in names:
        raise ValueError(f"{name} is there twice")
    names.add(name)


def _check_call(call: OperatorCall, known: set[str]) -> None:
    """Raises ValueError unless the call fits its operator and reads `known` values."""
    operator = call.operator
    _check_arguments(call.name, operator)
    if len(call.reads) != len(operator.inputs) or len(call.results) != len(operator.outputs):
        raise ValueError(f"{call.name}: reads and results are not as many as the operator has")
    if unknown := next((value for value in call.reads if value not in known), None):
        raise ValueError(f"{call.name}: there is no value {unknown} before it")
    for value, type_ in zip(call.results, operator.outputs, strict=True):
        if value is not None and type_ is None:
            raise ValueError(f"{call.name}: {value} is not computed")


def _check_arguments(where: str, operator: Operator) -> None:
    """Raises ValueError if an argument stands for an input that the operator does not have."""
    arguments = [*operator.arguments, *(value for _, value in operator.keywords)]
    scalars = [each for value in arguments for each in _scalars(value)]
    numbers = [each.input for each in scalars if isinstance(each, Input)] + [*operator.writes]
    if any(number >= len(operator.inputs) for number in numbers):
        raise ValueError(f"{where}: an argument is none of the operator's inputs")
    sizes = len(operator.inputs), len(operator.outputs)
    if any((len(way.inputs), len(way.outputs)) != sizes for way in operator.ways):
        raise ValueError(f"{where}: a way has not as many placements as the operator tensors")


def _scalars(argument: Argument) -> tuple[Scalar, ...]:
    return argument if isinstance(argument, tuple) else (argument,)


def read_operators(path: Path) -> OperatorProfile:
    """Reads operators.json. Raises UserError `FILE: where: what is wrong`."""
    profile = read_artifact(path, OperatorProfile)
    # Equal operators, as of equal layers, are one object: then they are found without comparing.
    known: dict[Operator, Operator] = {}
    for timed in profile.local_seconds:
        known.setdefault(timed.operator, timed.operator)
    calls = tuple(
        call.model_copy(update={"operator": known.setdefault(call.operator, call.operator)})
        for call in profile.graph.calls
    )
    return profile.model_copy(update={"graph": profile.graph.model_copy(update={"calls": calls})})


def write_operators(profile: OperatorProfile, path: Path) -> None:
    write_whole(path, profile.model_dump_json() + "\n")
