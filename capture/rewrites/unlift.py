"""Takes the program that torch.export gives as a graph whose parameters are attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from pipedream.capture.captured import OutSpec
from pipedream.capture.rewrites.no_grad import inline_no_grad
from pipedream.capture.rewrites.writes import changes_something


def unlift(program: ExportedProgram, model: nn.Module) -> tuple[fx.GraphModule, OutSpec]:
    """The program with parameters, buffers and constants as attributes, and how it returns.

    A tied parameter has the first of its names, as in `model.named_parameters()`, and so has a
    buffer of several modules: it is one attribute, lest a write by one name be missed by another.
    """
    attribute_values: dict[str, Any] = {**program.state_dict, **program.constants}
    states = (*model.named_parameters(), *model.named_buffers())
    first = {id(state): name for name, state in states}
    attributes = {
        spec.arg.name: first.get(id(attribute_values[spec.target]), spec.target)
        for spec in program.graph_signature.input_specs
        if spec.kind is not InputKind.USER_INPUT and spec.target is not None
    }
    root = nn.Module()
    graph = fx.Graph()
    renamed: dict[fx.Node, fx.Node] = {}
    attribute_nodes: dict[str, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder" and node.name in attributes:
            target = attributes[node.name]
            if target not in attribute_nodes:
                _attach(root, target, attribute_values[target])
                attribute_nodes[target] = graph.create_node("get_attr", target, name=node.name)
            renamed[node] = attribute_nodes[target]
        elif node.op == "get_attr":
            _attach(root, node.target, getattr(program.graph_module, node.target))
            renamed[node] = graph.node_copy(node)
        else:
            renamed[node] = graph.node_copy(node, renamed.__getitem__)
        renamed[node].meta = dict(node.meta)
    names, out_spec = _user_outputs(program)
    by_name = {node.name: renamed[node] for node in renamed}
    returned = {name: _computed(by_name[name]) for name in dict.fromkeys(names)}
    graph.output(tuple(returned[name] for name in names))
    module = fx.GraphModule(root, graph)
    inline_no_grad(module)
    _drop_dead(module)
    return module, out_spec


def _computed(value: fx.Node) -> fx.Node:
    """The value; of a parameter or buffer that a model returns as it is, a copy, which an operator
    computes: so a stage has it, and the next minibatches do not change it.
    """
    if value.op != "get_attr":
        return value
    copied = value.graph.call_function(torch.ops.aten.clone.default, (value,))
    copied.meta = dict(value.meta)
    return copied


def _user_outputs(program: ExportedProgram) -> tuple[list[str], OutSpec]:
    """The names of the tensors that the program returns, and the structure that they are in."""
    tree = program.call_spec.out_spec
    assert tree is not None
    specs = program.graph_signature.output_specs
    returned = [spec.arg for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    fixed = {
        index: each.value
        for index, each in enumerate(returned)
        if isinstance(each, ConstantArgument)
    }
    return [each.name for each in returned if not isinstance(each, ConstantArgument)], OutSpec(
        tree, fixed
    )


def _attach(root: nn.Module, name: str, value: Any) -> None:
    """Sets `root.a.b.c` to a parameter, buffer, constant or submodule."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(last, value)
    else:
        setattr(root, last, value)


def _drop_dead(module: fx.GraphModule) -> None:
    """Removes leftovers of the export: assertions, unused values, inputs that are not tensors."""
    for node in reversed(module.graph.nodes):
        if "_assert" in str(node.target) and not node.users:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code(changes_something)
    for node in list(module.graph.nodes):
        no_tensor = node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor)
        if no_tensor and not node.users:
            module.graph.erase_node(node)
    module.recompile()
