"""Replaces in-place writes of a captured graph by new values wherever that changes nothing.

A stage must not write into a tensor that another stage reads, and autograd rejects writes into
inputs. So `relu_(x)` becomes `relu(x)`, and later readers of x read the result.

Buffers are state. If a model does more with a buffer than one write, as batch norm does with its
count, the pass works on a copy and the buffer takes over its final value. Other stages can then
read the copy, and no later minibatch writes into what the backward pass of an earlier one needs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch import fx, nn


def make_functional(module: fx.GraphModule) -> None:
    """Replaces in-place writes by new values, except those to buffers and to shared memory.

    Goes from the last write to the first, since the result of a later write is another name of the
    memory that earlier ones write.
    """
    for state in module.graph.find_nodes(op="get_attr"):
        _copy_state(state)
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


def make_dense(module: fx.GraphModule) -> None:
    """Sets `sparse=False` in embeddings: few optimizers, no all-reduce and no fused step support
    sparse gradients. The values are the same.
    """
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            for index, argument in enumerate(node.target._schema.arguments[: len(node.args)]):
                if argument.name == "sparse":
                    node.update_arg(index, False)
    module.recompile()


def _copy_state(state: fx.Node) -> None:
    """Makes the pass work on a copy of a buffer that it changes, then writes the copy back."""
    if isinstance(_attribute(state), nn.Parameter):
        return
    memory = _aliases(state)
    writes = [node for node in memory if not memory.isdisjoint(_targets(node))]
    alone = [node for node in writes if written(node) is state and not node.users]
    if not writes or (len(alone) == 1 and set(state.users) == set(alone)):
        return
    position = {node: index for index, node in enumerate(state.graph.nodes)}
    first, last = min(state.users, key=position.__getitem__), max(writes, key=position.__getitem__)
    with state.graph.inserting_before(first):
        copy = state.graph.call_function(torch.ops.aten.clone.default, (state,))
    state.replace_all_uses_with(copy, lambda user: user is not copy)
    with state.graph.inserting_after(last):
        taken = state.graph.call_function(torch.ops.aten.copy_.default, (state, copy))
    copy.meta = {**first.meta, "val": state.meta.get("val")}
    taken.meta = {**last.meta, "val": state.meta.get("val")}


def _attribute(state: fx.Node) -> object:
    """The attribute that a get_attr node reads."""
    value: object = operator.attrgetter(str(state.target))(state.graph.owning_module)
    return value


def writes_parameter(module: fx.GraphModule) -> fx.Node | None:
    """An operator that writes into a parameter, or None."""
    for node in module.graph.nodes:
        for target in _targets(node):
            states = (each for each in _aliases(target) if each.op == "get_attr")
            if any(isinstance(_attribute(state), nn.Parameter) for state in states):
                assert isinstance(node, fx.Node)
                return node
    return None


def writes_shared_memory(module: fx.GraphModule) -> Iterable[set[fx.Node]]:
    """For each remaining in-place write, the operators that use the written memory.

    These include readers before the write, which in another stage would run too late. For a buffer
    they are all that read or write it.
    """
    before: set[fx.Node] = set()
    for node in module.graph.nodes:
        for target in _targets(node):
            if target.op == "get_attr":
                yield set(target.users)
            else:
                memory = _aliases(target)
                yield memory | {node} | {user for each in memory for user in each.users} & before
        before.add(node)


def _targets(node: fx.Node) -> list[fx.Node]:
    """The values that an operator, or a region without gradient, writes into."""
    target = written(node)
    if target is not None:
        return [target]
    parts = [arg for arg in node.args if isinstance(arg, fx.Node) and arg.op == "get_attr"]
    part = _attribute(parts[0]) if isinstance(node.target, torch._ops.HigherOrderOperator) else None
    if not isinstance(part, fx.GraphModule):
        return []
    operands = node.args[node.args.index(parts[0]) + 1 :]
    inside = part.graph.find_nodes(op="placeholder")
    changed = set().union(
        *(_aliases(value) for each in part.graph.nodes for value in _targets(each))
    )
    pairs = zip(inside, operands, strict=False)
    return [value for place, value in pairs if place in changed and isinstance(value, fx.Node)]


def written(node: fx.Node) -> fx.Node | None:
    """The value that an operator writes into: its first argument, or None."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return None
    first = node.target._schema.arguments[0]
    written = first.alias_info is not None and first.alias_info.is_write
    return node.args[0] if written and isinstance(node.args[0], fx.Node) else None


def _functional(target: object) -> torch._ops.OpOverload | None:
    """`aten.relu.default` for `aten.relu_.default`, or None if there is no such operator."""
    assert isinstance(target, torch._ops.OpOverload)
    name = target._schema.name.partition("::")[2].removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, target._overloadname, None)


def _read_instead(old: fx.Node, new: fx.Node) -> None:
    """Makes everything after `new` that reads `old` read `new` instead."""
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
    """All values that may share memory with `value`: views of it, what it views, and so on."""

    def sharing(node: fx.Node) -> list[fx.Node]:
        return _viewed(node) + [user for user in node.users if node in _viewed(user)]

    return reachable(value, sharing)


def reachable(start: fx.Node, neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """`start`, its neighbours, their neighbours, and so on."""
    seen, waiting = {start}, [start]
    while waiting:
        fresh = set(neighbours(waiting.pop())) - seen
        seen |= fresh
        waiting += fresh
    return seen


def _viewed(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result of `node` may share."""
    if node.op != "call_function":
        return []
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _targets(node)
    if not isinstance(node.target, torch._ops.OpOverload):  # getitem of a tuple of views
        return list(node.all_input_nodes[:1])
    shared = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and index < len(node.args):
            value = node.args[index]
            shared += [value] if isinstance(value, fx.Node) else []
    return shared
