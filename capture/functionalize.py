"""Writes in place, taken out of a captured graph wherever that changes nothing.

A stage may not write into what another stage reads, and autograd refuses a write into a tensor that
came from outside; so `relu_(x)` becomes `relu(x)` and whoever read x afterwards reads the result.

Buffers are state. Where a model does more with one than write it once, as batch norm does with its
count, the pass works on a copy, a value like any other, and the buffer gets what has become of it:
so other stages may read the value, and no later minibatch writes into what the backward pass of an
earlier one needs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn


def make_functional(module: fx.GraphModule) -> None:
    """Replaces writes in place by new values; leaves those to buffers and to shared memory.

    The last write first: until then its result is one more name of the memory written before.
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
    """Takes out `sparse=True` of embeddings: only some optimizers know what to do with gradients
    like that, and neither sums over replicas nor torch's fused steps do. The values are the same.
    """
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            for index, argument in enumerate(node.target._schema.arguments[: len(node.args)]):
                if argument.name == "sparse":
                    node.update_arg(index, False)
    module.recompile()


def _copy_state(state: fx.Node) -> None:
    """Has the pass work on a copy of a buffer that it changes, and the buffer take that over."""
    if isinstance(_held(state), nn.Parameter):
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


def _held(state: fx.Node) -> object:
    """The attribute that a get_attr node reads."""
    held: object = state.graph.owning_module
    for part in str(state.target).split("."):
        held = getattr(held, part)
    return held


def writes_parameter(module: fx.GraphModule) -> fx.Node | None:
    """An operator that writes into a parameter, if there is one."""
    for node in module.graph.nodes:
        for target in _targets(node):
            states = (each for each in _aliases(target) if each.op == "get_attr")
            if any(isinstance(_held(state), nn.Parameter) for state in states):
                assert isinstance(node, fx.Node)
                return node
    return None


def writes_shared_memory(module: fx.GraphModule) -> Iterable[set[fx.Node]]:
    """For each write in place that is left: the operators that see the written memory.

    Those that read it before the write are among them: as stages of their own they would come too
    late. Of a buffer these are all that read or write it.
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
    """The values that an operator, or a stretch without gradient, writes into."""
    target = written(node)
    if target is not None:
        return [target]
    parts = [arg for arg in node.args if isinstance(arg, fx.Node) and arg.op == "get_attr"]
    part = _held(parts[0]) if isinstance(node.target, torch._ops.HigherOrderOperator) else None
    if not isinstance(part, fx.GraphModule):
        return []
    given = node.args[node.args.index(parts[0]) + 1 :]
    inside = part.graph.find_nodes(op="placeholder")
    changed = set().union(
        *(_aliases(value) for each in part.graph.nodes for value in _targets(each))
    )
    pairs = zip(inside, given, strict=False)
    return [value for place, value in pairs if place in changed and isinstance(value, fx.Node)]


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
    found, waiting = {value}, [value]
    while waiting:
        node = waiting.pop()
        views = [user for user in node.users if node in _viewed(user)]
        fresh = {*_viewed(node), *views} - found
        found |= fresh
        waiting += fresh
    return found


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
