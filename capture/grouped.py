"""A module as groups of operators that are compiled each by itself, equal ones once.

Groups follow each other, so that they run in the order of the module. Their parameters and buffers
are given to them like values: then groups that differ in nothing else have one form, and are
compiled as one function.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

from pipedream.capture.captured import Captured
from pipedream.capture.module_tensors import ModuleTensors
from pipedream.capture.rewrites.compilable import in_own_memory
from pipedream.graph.placements.module_groups import module_groups

_GROUP = "group"
"""Where the meta of an operator has its mark."""


@dataclass(frozen=True)
class _Mark:
    """The number of an operator's group, whether that is compiled, and the operator's node."""

    group: tuple[int, bool] = (-1, True)
    node: str | None = None


@dataclass(frozen=True)
class Group:
    """`module(*takes) -> tuple of gives`; `ends`: what nobody reads after it.

    Names are those of values, and of parameters and buffers. `form`: equal for groups that compute
    the same of tensors of the same shapes, strides and types. `nodes`: whose operators these are;
    `compiled`: whether it is to be.
    """

    module: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    ends: tuple[str, ...]
    form: str
    nodes: tuple[str, ...] = ()
    compiled: bool = True


@dataclass(frozen=True)
class Grouped:
    """`groups` of a module that reads `state` beside its `inputs`, and gives `outputs`."""

    groups: Sequence[Group]
    state: ModuleTensors
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @staticmethod
    def of(module: fx.GraphModule) -> Grouped:
        """Divides the module, whose output is a tuple of values, where the groups of its operators
        change. What has none belongs to the operator after it, as seeds do.
        """
        graph = module.graph
        (output,) = graph.find_nodes(op="output")
        parts = list(_parts(graph))
        last = {
            source: k for k, part in enumerate(parts) for n in part for source in n.all_input_nodes
        }
        last |= dict.fromkeys(output.all_input_nodes, len(parts))
        groups = [_group(module, k, part, last) for k, part in enumerate(parts)]
        (given,) = output.args
        assert isinstance(given, (tuple, list))
        inputs = tuple(str(n.name) for n in graph.find_nodes(op="placeholder"))
        outputs = tuple(_name(each) for each in given)
        return Grouped(groups, ModuleTensors.of(module), inputs, outputs)

    @property
    def forms(self) -> int:
        """How many of the groups that are compiled differ."""
        return len({group.form for group in self.groups if group.compiled})

    def run_by(
        self, compute: Callable[[Group], Callable[..., Any]]
    ) -> Callable[[Mapping[str, Tensor], tuple[Tensor, ...]], Any]:
        """Returns what runs the module, each group by what `compute` makes of it."""
        runs = [(group, compute(group)) for group in self.groups]

        def run(tensors: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> Any:
            values = dict(zip(self.inputs, inputs, strict=True))
            values |= {name: self.state.find(name, tensors) for name in self.state.names}
            for group, own in runs:
                results = own(*(values[name] for name in group.takes))
                values.update(zip(group.gives, results, strict=True))
                for name in group.ends:  # so that no value is held longer than by the module
                    del values[name]
            return tuple(values[name] for name in self.outputs)

        return run


def mark_groups(
    module: fx.GraphModule,
    captured: Captured,
    nodes: Collection[str],
    eager: Collection[str] = (),
) -> None:
    """Says of the operators of the module, which are those of these nodes, in which group each is:
    that of one block of the model. Rewritten operators stay where they are. Groups of nodes that
    are to be `eager` are not compiled.
    """
    own = [name for name in captured.graph.order if name in nodes]
    groups = module_groups(own, captured.module_paths)
    number = {name: k for k, group in enumerate(groups) for name in group}
    for node in module.graph.nodes:
        if (owner := captured.owner.get(node.name)) in number:
            node.meta[_GROUP] = _Mark((number[owner], owner not in eager), owner)


def _parts(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yields the operators of each group, in order."""
    found: list[tuple[tuple[int, bool], fx.Node]] = []
    after = _Mark()
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "call_module"):
            after = node.meta.get(_GROUP, after)
            found.append((after.group, node))
    for _, part in groupby(reversed(found), key=lambda each: each[0]):
        yield [node for _, node in part]


def _group(
    module: fx.GraphModule, number: int, part: Sequence[fx.Node], last: Mapping[fx.Node, int]
) -> Group:
    """Returns these operators as a module; `last`: the last group that reads a value."""
    inside = set(part)
    read = dict.fromkeys(source for node in part for source in node.all_input_nodes)
    given = [source for source in read if source not in inside and not _is_part(source, module)]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for source in given:
        copies[source] = graph.placeholder(f"given_{len(copies)}")
        copies[source].meta = dict(source.meta)
    for source in read:
        if source not in inside and source not in copies:
            copies[source] = graph.node_copy(source)
    for node in part:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    gives = [node for node in part if last.get(node, number) > number]
    graph.output(tuple(in_own_memory(graph, [copies[node] for node in gives])))
    ends = [
        node
        for node in (*given, *gives)
        if node.op != "get_attr" and last.get(node, number) == number
    ]
    takes, given_on, done = (tuple(map(_name, nodes)) for nodes in (given, gives, ends))
    marks = [mark for node in part if (mark := node.meta.get(_GROUP)) is not None]
    nodes = tuple(dict.fromkeys(mark.node for mark in marks))
    is_compiled = all(mark.group[1] for mark in marks)
    own = fx.GraphModule(module, graph)
    return Group(own, takes, given_on, done, _form(graph), nodes, is_compiled)


def _is_part(source: fx.Node, module: fx.GraphModule) -> bool:
    """Tells whether it is a module that an operator calls, such as a branch."""
    if source.op != "get_attr":
        return False
    return not isinstance(operator.attrgetter(str(source.target))(module), Tensor)


def _name(node: Any) -> str:
    """Returns that of a value, or of the tensor that is read."""
    assert isinstance(node, fx.Node)
    return str(node.target) if node.op == "get_attr" else node.name


def _form(graph: fx.Graph) -> str:
    """Returns a hash of the operators, how they read each other, and the types of all values."""
    numbers: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda each: _Shown(numbers[each]))
        own = "" if node.op == "placeholder" else str(node.target)
        lines.append(f"{node.op} {own} {arguments} {_type(node.meta.get('val'))}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Shown(str):
    """A reference among arguments, unlike any string."""

    def __repr__(self) -> str:
        return str(self)


def _type(value: Any) -> str:
    """Describes what compiling depends on."""
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_type, value))
    if not isinstance(value, Tensor):
        return type(value).__name__
    strides = value.stride() if value.layout == torch.strided else ()
    return f"{value.dtype} {tuple(value.shape)} {strides} {value.requires_grad}"
