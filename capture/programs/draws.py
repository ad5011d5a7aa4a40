"""Random numbers of a joint graph: drawn before the passes, and inputs of them.

A draw such as that of dropout needs the shape of the data, not the data. It is cut off the graph
with what is computed of it alone, so that the passes are functions of their inputs, which may be
compiled and repeated. A draw that needs data stays in the forward pass, after its seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from pipedream.capture.rewrites.writes import changes_something, is_draw

HOOK = "seed_hook"
"""Where the meta of a node says which module has seeded the generator for its draw."""

_Noted: TypeAlias = list[tuple[int, nn.Module]]
"""Modules that have seeded, and how many nodes the graph had before."""

_noted: ContextVar[_Noted | None] = ContextVar("seeds of the graph that is traced", default=None)


@dataclass(frozen=True)
class Draws:
    """`module()` draws the values of the placeholders `nodes` of a joint graph."""

    module: fx.GraphModule
    nodes: Sequence[fx.Node]


def note_seed(hook: nn.Module) -> bool:
    """Tells, for a module that seeds the generator for the operator after it, whether its call is
    noted, since the operators are only traced. The programs call `hook` when they run.
    """
    mode, noted = get_proxy_mode(), _noted.get()
    if mode is None or noted is None:
        return False
    noted.append((len(mode.tracer.graph.nodes), hook))
    return True


@contextmanager
def noting_seeds() -> Iterator[None]:
    """Gives the context of a trace, after which nodes that draw know the hook that seeded them."""
    noted: _Noted = []
    token = _noted.set(noted)
    try:
        yield
        mode = get_proxy_mode()
        if mode is not None:
            _tell(list(mode.tracer.graph.nodes), noted)
    finally:
        _noted.reset(token)


def _tell(nodes: Sequence[fx.Node], noted: _Noted) -> None:
    ends = [index for index, _ in noted[1:]] + [len(nodes)]
    for (begin, hook), end in zip(noted, ends, strict=False):
        for node in nodes[begin:end]:
            if is_draw(node):
                node.meta[HOOK] = hook


def take_draws(joint: fx.GraphModule) -> Draws:
    """Cuts off, in place, what is drawn without data. Several draws after one seed are taken all or
    none, because each goes on where the one before it has left the generator.
    """
    members = _members(joint.graph)
    inside = [node for node in joint.graph.nodes if node in members]
    results = [node for node in inside if not members.issuperset(node.users)]
    graph = fx.Graph()
    data = {source for node in inside for source in node.all_input_nodes} - members
    copies = {source: _empty_like(graph, source) for source in data}
    copy_seeded(joint, graph, inside, copies)
    graph.output(tuple(copies[node] for node in results))
    drawn = [_as_input(joint.graph, node) for node in results]
    for node in reversed(inside):
        joint.graph.erase_node(node)
    joint.graph.eliminate_dead_code(changes_something)
    return Draws(fx.GraphModule(joint, graph), drawn)


def copy_seeded(
    root: fx.GraphModule,
    graph: fx.Graph,
    inside: Sequence[fx.Node],
    copies: dict[fx.Node, fx.Node],
) -> None:
    """Copies these nodes into `graph`, with the seeds before their draws; `root` gets the hooks."""
    seeded: nn.Module | None = None
    for node in inside:
        hook = node.meta.get(HOOK)
        if hook is not None and hook is not seeded:
            name = f"seed_{id(hook)}"
            root.add_submodule(name, hook)
            graph.call_module(name)
            seeded = hook
        copies[node] = _copied(graph, node, copies)


def _copied(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Copies a draw. `bernoulli.p` draws into contiguous memory, whatever it is given; in its place
    comes what it stands for since the graph was made functional, `bernoulli_`, in the order in
    which the memory lies.
    """
    like = node.args[0] if node.args else None
    if node.target is not torch.ops.aten.bernoulli.p or not isinstance(like, fx.Node):
        return graph.node_copy(node, copies.__getitem__)
    memory = _empty_like(graph, like)
    return graph.call_function(
        torch.ops.aten.bernoulli_.float, (memory, *node.args[1:]), node.kwargs
    )


def _empty_like(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Makes a tensor in the place of data of which only the shape is read."""
    value = node.meta["val"]
    where = {"dtype": value.dtype, "device": value.device}
    sizes = list(value.shape), list(value.stride())
    return graph.call_function(torch.ops.aten.empty_strided.default, sizes, where)


def _members(graph: fx.Graph) -> set[fx.Node]:
    """Returns draws that need no data, what comes of them alone, and what they are made of."""
    barred = set[fx.Node]()
    while True:
        free = _free(graph, barred)
        members = {node for node in free if is_draw(node)}
        for node in graph.nodes:
            if node in free and not members.isdisjoint(node.all_input_nodes):
                members.add(node)
        for node in reversed(graph.nodes):
            if node in free and not members.isdisjoint(node.users):
                members.add(node)
        unfit = _unfit(graph, members)
        if not unfit:
            return members
        barred |= unfit


def _free(graph: fx.Graph, barred: Set[fx.Node]) -> set[fx.Node]:
    """Returns the operators that need neither data nor what is `barred`."""
    free = set[fx.Node]()
    for node in graph.nodes:
        if node.op != "call_function" or node in barred:
            continue
        if _reads_shape_alone(node) or free.issuperset(node.all_input_nodes):
            free.add(node)
    return free


def _reads_shape_alone(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return False
    name = node.target._schema.name.partition("::")[2]
    value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    return (name.endswith("_like") or name.startswith("new_")) and isinstance(value, Tensor)


def _unfit(graph: fx.Graph, members: Set[fx.Node]) -> set[fx.Node]:
    """Returns the members that have to stay: draws whose seed another draw shares that stays."""
    draws = [node for node in graph.nodes if is_draw(node)]
    staying = {node.meta.get(HOOK) for node in draws if node not in members}
    return {node for node in members if is_draw(node) and node.meta.get(HOOK) in staying}


def _as_input(graph: fx.Graph, node: fx.Node) -> fx.Node:
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        placeholder = graph.placeholder(f"drawn_{node.name}")
    placeholder.meta = dict(node.meta)
    placeholder.meta.pop(HOOK, None)
    node.replace_all_uses_with(placeholder)
    return placeholder
