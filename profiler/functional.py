"""Writes in place, taken out of a captured graph wherever that changes nothing.

A stage may not write into what another stage reads, and autograd refuses a write into a tensor that
came from outside; so `relu_(x)` becomes `relu(x)` and whoever read x afterwards reads the result.
Writes to buffers (batch norm's statistics) stay: they are state, not values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import fx


def make_functional(module: fx.GraphModule) -> None:
    """Replaces writes in place by new values; leaves those to buffers and to shared memory.

    The last write first: until then its result is one more name of the memory written before.
    """
    for node in reversed(list(module.graph.nodes)):
        target = written(node)
        if target is None or target.op == "get_attr" or _shares(node, target):
            continue
        functional = _functional(node.target)
        if functional is None:
            continue
        node.target = functional
        _read_instead(target, node)
    module.graph.lint()
    module.recompile()


def writes_shared_memory(module: fx.GraphModule) -> Iterable[set[fx.Node]]:
    """For each write in place that is left: the operators that see the written memory."""
    for node in module.graph.nodes:
        target = written(node)
        if target is not None and target.op != "get_attr":
            yield _aliases(target) | {node}


def written(node: fx.Node) -> fx.Node | None:
    """The value that an operator writes into: that of its first argument, or None."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return None
    first = node.target._schema.arguments[0]
    written = first.alias_info is not None and first.alias_info.is_write
    return node.args[0] if written and isinstance(node.args[0], fx.Node) else None


def _functional(target: object) -> torch._ops.OpOverload | None:
    """`aten.relu_.default` as `aten.relu.default`, where there is one."""
    assert isinstance(target, torch._ops.OpOverload)
    name = target._schema.name.partition("::")[2].removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, target._overloadname, None)


def _read_instead(old: fx.Node, new: fx.Node) -> None:
    """Lets everything after `new` that reads `old` read `new`."""
    later = False
    for node in old.graph.nodes:
        if later and node in old.users:
            node.replace_input_with(old, new)
        later = later or node is new


def _shares(write: fx.Node, target: fx.Node) -> bool:
    """Whether another name of the written memory is read after the write."""
    others = _aliases(target) - {target, write}
    after = False
    for node in write.graph.nodes:
        if after and any(source in others for source in node.all_input_nodes):
            return True
        after = after or node is write
    return False


def _aliases(value: fx.Node) -> set[fx.Node]:
    """All values that may lie in the same memory: views of it, what it views, and so on."""
    neighbours: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node in value.graph.nodes:
        for source in _viewed(node):
            neighbours[node].add(source)
            neighbours[source].add(node)
    found, waiting = {value}, [value]
    while waiting:
        fresh = neighbours[waiting.pop()] - found
        found |= fresh
        waiting += fresh
    return found


def _viewed(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result of `node` may share."""
    if node.op != "call_function":
        return []
    if not isinstance(node.target, torch._ops.OpOverload):  # getitem of a tuple of views
        return list(node.all_input_nodes[:1])
    shared = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and index < len(node.args):
            value = node.args[index]
            shared += [value] if isinstance(value, fx.Node) else []
    return shared
