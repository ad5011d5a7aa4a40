"""A joint graph as plain data for planners, and an operator of that data, executed."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pipedream.capture.programs.joint import Joint
from pipedream.graph.placements.operators import (
    Argument,
    Input,
    Operator,
    OperatorCall,
    OperatorGraph,
    Scalar,
    Special,
    StageInput,
    StageOutput,
    TensorType,
)

_WRITES_STATISTICS = (
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
)
"""These change running mean and variance, arguments 3 and 4, though their schemas do not say so."""


def describe(joint: Joint) -> OperatorGraph:
    """Describes the graph with all its operators, named as its nodes are; output k of an operator
    that has several is `name.k`.
    """
    calls = [
        _call(node)
        for node in joint.module.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]
    return OperatorGraph(
        inputs=tuple(_inputs(joint)), calls=tuple(calls), outputs=tuple(_outputs(joint))
    )


def value_name(node: fx.Node) -> str:
    """Returns the name of the value that a node has in the description."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        return f"{source.name}.{index}"
    return node.name


def execute(described: Operator, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Computes the operator, on tensors of the types of its inputs; all its outputs."""
    arguments, keywords = read_arguments(described, inputs)
    result = executable(described)(*arguments, **keywords)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def executable(described: Operator) -> torch._ops.OpOverload:
    """Returns what computes the operator. Tensors may lie in memory in another way than where it
    was traced, so a view is a reshape.
    """
    target: Any = torch.ops
    for part in described.target.replace("aten.view.default", "aten.reshape.default").split("."):
        target = getattr(target, part)
    assert isinstance(target, torch._ops.OpOverload), described.target
    return target


def dtype_of(type_: TensorType) -> torch.dtype:
    """Returns the type of its elements."""
    dtype = getattr(torch, type_.dtype)
    assert isinstance(dtype, torch.dtype), type_.dtype
    return dtype


def read_arguments(
    described: Operator, inputs: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with these inputs: tensors, or nodes of a graph."""
    arguments = tuple(_read(each, inputs) for each in described.arguments)
    return arguments, {name: _read(value, inputs) for name, value in described.keywords}


def describe_operator(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[Operator, list[Any]]:
    """Describes the operator, and returns its inputs in order: tensors, or nodes with one."""
    sources: list[Any] = []
    arguments = tuple(_plain(each, sources) for each in args)
    keywords = tuple((name, _plain(value, sources)) for name, value in kwargs.items())
    outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
    mask = arguments[-1] if arguments else None
    if isinstance(mask, tuple) and len(mask) == len(outputs):
        outputs = tuple(
            x if wanted is not False else None for x, wanted in zip(outputs, mask, strict=True)
        )
    described = Operator(
        target=str(target),
        arguments=arguments,
        keywords=keywords,
        inputs=tuple(map(_type_in_memory, sources)),
        outputs=tuple(_type(x) if isinstance(x, Tensor) else None for x in outputs),
        writes=tuple(_writes(target._schema, arguments)),
    )
    return described, sources


def _call(node: fx.Node) -> OperatorCall:
    assert isinstance(node.target, torch._ops.OpOverload), node.target
    value = node.meta.get("val", ())  # () of those that only look at something, and give nothing
    described, sources = describe_operator(node.target, node.args, node.kwargs, value)
    results: list[str | None] = [node.name]
    if isinstance(value, tuple | list):
        read = {user.args[1] for user in node.users if user.target is operator.getitem}
        results = [f"{node.name}.{k}" if k in read else None for k in range(len(value))]
    return OperatorCall(
        name=node.name,
        operator=described,
        reads=tuple(map(value_name, sources)),
        results=tuple(results),
    )


def _writes(schema: torch.FunctionSchema, arguments: Sequence[Argument]) -> Iterator[int]:
    for position, argument in enumerate(arguments):
        alias = schema.arguments[position].alias_info
        changed = alias is not None and alias.is_write
        if isinstance(argument, Input) and (
            changed or (schema.name in _WRITES_STATISTICS and position in (3, 4))
        ):
            yield argument.input


def _type(source: fx.Node | Tensor) -> TensorType:
    tensor = source.meta["val"] if isinstance(source, fx.Node) else source
    return TensorType(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        element_bytes=tensor.element_size(),
    )


def _type_in_memory(source: fx.Node | Tensor) -> TensorType:
    """Returns its type, and how it lies in memory."""
    tensor = source.meta["val"] if isinstance(source, fx.Node) else source
    return _type(source).model_copy(update={"order": _order(tensor)})


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Returns the dimensions by their strides; nothing of one that lies there as it is counted, or
    is repeated, and must be laid out before it is read.
    """
    if tensor.layout != torch.strided:
        return ()
    strides = tensor.stride()
    long = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    by_stride = sorted(long, key=lambda dim: -strides[dim])
    if by_stride == long or any(strides[dim] == 0 for dim in long):
        return ()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _plain(argument: Any, sources: list[Any]) -> Argument:
    if isinstance(argument, tuple | list):
        return tuple(_scalar(each, sources) for each in argument)
    return _scalar(argument, sources)


def _scalar(argument: Any, sources: list[Any]) -> Scalar:
    match argument:
        case fx.Node() | Tensor():
            sources.append(argument)
            return Input(input=len(sources) - 1)
        case torch.dtype() | torch.layout() | torch.memory_format():
            kind: Any = type(argument).__name__
            return Special(kind=kind, name=str(argument).removeprefix("torch."))
        case torch.device():
            return Special(kind="device", name=str(argument))
        case float() if argument - argument != 0:
            return Special(kind="float", name=str(argument))
    assert argument is None or isinstance(argument, bool | int | float | str), argument
    return argument


def _read(argument: Argument, inputs: Sequence[Any]) -> Any:
    match argument:
        case tuple():
            return [_read(each, inputs) for each in argument]
        case Input(input=number):
            return inputs[number]
        case Special(kind="float", name=name):
            return float(name)
        case Special(kind="device", name=name):
            return torch.device(name)
        case Special(name=name):
            return getattr(torch, name)
    return argument


def _inputs(joint: Joint) -> Iterator[StageInput]:
    learned = joint.weight_gradients.keys()
    for name, node in joint.weights.items():
        yield _input(node, "parameter" if name in learned else "buffer", name)
    for role, nodes in (
        ("input", joint.inputs),
        ("tangent", joint.tangents),
        ("draw", joint.draws.nodes),
        ("constant", joint.module.graph.find_nodes(op="get_attr")),
    ):
        for number, node in enumerate(nodes):
            yield _input(node, role, str(number))


def _input(node: fx.Node, role: Any, name: str) -> StageInput:
    return StageInput(value=node.name, role=role, name=name, type=_type(node))


def _outputs(joint: Joint) -> Iterator[StageOutput]:
    for number, node in enumerate(joint.outputs):
        yield StageOutput(value=value_name(node), role="output", name=str(number))
    for number, gradient in enumerate(joint.input_gradients):
        if gradient is not None:
            yield StageOutput(value=value_name(gradient), role="input gradient", name=str(number))
    for name, gradient in joint.weight_gradients.items():
        if gradient is not None:
            yield StageOutput(value=value_name(gradient), role="parameter gradient", name=name)
