"""What the operators of a captured graph write into, and which values share memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from pipedream.capture.rewrites.arguments import arguments, by_name

STATISTICS = ("running_mean", "running_var")
"""Arguments that norms change in training, though their schemas do not say so."""
_IN_TRAINING = ("training", "train", "use_input_stats")


def declared(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the values that an operator writes into, as its schema says."""
    for argument, value in arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, list | tuple) else [value]
            yield from (each for each in values if isinstance(each, fx.Node))


def written(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the values that an operator writes into, with the statistics of batch norms."""
    yield from declared(node)
    known = [(argument.name, value) for argument, value in arguments(node)]
    if "backward" in str(node.target) or any(n in _IN_TRAINING and not v for n, v in known):
        return
    for argument, value in arguments(node):
        silent = argument.alias_info is None and argument.name in STATISTICS
        if silent and isinstance(value, fx.Node):
            yield value


def targets(node: fx.Node) -> list[fx.Node]:
    """Returns the values that an operator, or a region such as one under autocast, writes into."""
    part = body(node)
    if part is None:
        return list(written(node))
    inside = part.graph.find_nodes(op="placeholder", sort=True)
    changed = set[fx.Node]().union(
        *(aliases(value) for each in part.graph.nodes for value in targets(each))
    )
    pairs = zip(inside, operands(node), strict=False)
    return [value for place, value in pairs if place in changed and isinstance(value, fx.Node)]


def body(node: fx.Node) -> fx.GraphModule | None:
    """Returns the graph of a region, such as one under autocast."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    parts = [arg for arg in node.args if isinstance(arg, fx.Node) and arg.op == "get_attr"]
    region = attribute(parts[0]) if parts else None
    return region if isinstance(region, fx.GraphModule) else None


def operands(region: fx.Node) -> list[Any]:
    """Returns what is given to the graph of a region."""
    bodies = [arg for arg in region.args if isinstance(arg, fx.Node) and arg.op == "get_attr"]
    return list(region.args[region.args.index(bodies[0]) + 1 :])


def attribute(state: fx.Node) -> object:
    """Returns the attribute that a get_attr node reads."""
    value: object = operator.attrgetter(str(state.target))(state.graph.owning_module)
    return value


def is_draw(node: fx.Node) -> bool:
    """Tells whether an operator draws random numbers. torch says so of attention without dropout,
    too, and of the backward operators of attention on GPUs; these only repeat what the forward one
    drew, from the state it left.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    drawing = torch.Tag.nondeterministic_seeded in target.tags
    forward = not target._opname.endswith("_backward")
    return drawing and forward and by_name(node).get("dropout_p") != 0.0


def written_attributes(node: fx.Node) -> Iterator[str]:
    """Yields the names of parameters and buffers that an operator writes into, by views too."""
    for target in targets(node):
        yield from (str(each.target) for each in aliases(target) if each.op == "get_attr")


def changes_something(node: fx.Node) -> bool:
    """Tells whether an operator that nobody reads is needed all the same."""
    return bool(node.is_impure()) or bool(targets(node))


def aliases(value: fx.Node) -> set[fx.Node]:
    """Returns all values that may share memory with `value`, views of views included."""

    def sharing(node: fx.Node) -> list[fx.Node]:
        return viewed(node) + [user for user in node.users if node in viewed(user)]

    return reachable(value, sharing)


def reachable(start: fx.Node, neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Returns `start`, its neighbours, their neighbours, and so on."""
    seen, waiting = {start}, [start]
    while waiting:
        fresh = set(neighbours(waiting.pop())) - seen
        seen |= fresh
        waiting += fresh
    return seen


def viewed(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments whose memory the result of `node` may share."""
    if node.op != "call_function":
        return []
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return targets(node)
    if not isinstance(node.target, torch._ops.OpOverload):  # getitem of a tuple of views
        return list(node.all_input_nodes[:1])
    shared = [value for argument, value in arguments(node) if argument.alias_info is not None]
    return [value for value in shared if isinstance(value, fx.Node)]


def memory_of(node: fx.Node) -> int | None:
    """Returns an identity of the memory in the export; None for what is no tensor."""
    value = node.meta.get("val")
    return int(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None
