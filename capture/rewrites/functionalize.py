"""Replaces in-place writes of a captured graph by new values wherever that changes nothing.

A stage must not write into a tensor that another stage reads, and autograd rejects writes into
inputs. So `relu_(x)` becomes `relu(x)`, and later readers of x, or of a view of x, read the result.
Of a write into a view, the result is what it is a view of, with another part.

Buffers are state. If a model does more with a buffer than one write, as batch norm does with its
count, the pass works on a copy and the buffer takes over its final value. Other stages can then
read the copy, and no later minibatch writes into what the backward pass of an earlier one needs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipedream.capture.rewrites.no_grad import needing_gradients
from pipedream.capture.rewrites.views import can_be_replaced, emit, replaced, source_of, view_again
from pipedream.capture.rewrites.writes import (
    aliases,
    attribute,
    body,
    changes_something,
    declared,
    memory_of,
    targets,
)

_aten = torch.ops.aten
_OTHER_NAMES: dict[object, torch._ops.OpOverload] = {
    _aten.bernoulli_.float: _aten.bernoulli.p,
    _aten.normal_.default: _aten.normal_functional.default,
}
"""What computes the same as an operator in place, where it is not called so."""
_DETACH = _aten.detach.default
_RESIZING = ("resize_", "resize_as_", "set_", "as_strided_", "swapaxes_", "swapdims_")
_VIEWS: dict[object, torch._ops.OpOverload] = {
    _aten.detach_.default: _DETACH,
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.t_.default: _aten.t.default,
}


def make_functional(module: fx.GraphModule) -> None:
    """Replaces in-place writes by new values, except to buffers and unknown views."""
    for state in module.graph.find_nodes(op="get_attr"):
        _copy_state(state)
    for node in module.graph.nodes:
        _replace_renaming(node)
    for memory in _memories(module.graph):
        if memory.can_be_replaced():
            memory.replace()
    module.graph.eliminate_dead_code(changes_something)
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
    if not isinstance(attribute(state), Tensor) or isinstance(attribute(state), nn.Parameter):
        return
    memory = aliases(state)
    users = dict.fromkeys(user for value in memory for user in value.users)
    writes = [user for user in users if not memory.isdisjoint(targets(user))]
    silent = all(not memory & set(declared(node)) and body(node) is None for node in writes)
    if silent or (set(state.users) == set(writes) and len(writes) == 1 and not _read(writes[0])):
        return
    position = {node: index for index, node in enumerate(state.graph.nodes)}
    first, last = min(state.users, key=position.__getitem__), max(writes, key=position.__getitem__)
    with state.graph.inserting_before(first):
        copy = emit(state.graph, _aten.clone.default, (state,), {}, first)
    state.replace_all_uses_with(copy, lambda user: user is not copy)
    with state.graph.inserting_after(last):
        emit(state.graph, _aten.copy_.default, (state, copy), {}, last)


def _replace_renaming(node: fx.Node) -> None:
    """Replaces `squeeze_` and the like, which only change what is read after them, by views."""
    view = _VIEWS.get(node.target)
    if view is None:
        return
    (before,) = declared(node)
    node.target, after = view, False
    for later in list(node.graph.nodes):
        if after:
            later.replace_input_with(before, node)
        after = after or later is node


def _read(write: fx.Node) -> bool:
    """Tells whether what an operator has written is read as its result."""
    return body(write) is None and any(True for _ in declared(write)) and bool(write.users)


def writes_parameter(module: fx.GraphModule) -> fx.Node | None:
    """Returns an operator that writes into a parameter, or None."""
    for node in module.graph.nodes:
        for target in targets(node):
            states = (each for each in aliases(target) if each.op == "get_attr")
            if any(isinstance(attribute(state), nn.Parameter) for state in states):
                assert isinstance(node, fx.Node)
                return node
    return None


def writes_shared_memory(module: fx.GraphModule) -> Iterable[set[fx.Node]]:
    """Yields the operators that use the written memory, for each remaining in-place write.

    These include readers before the write, which in another stage would run too late. For a buffer
    they are all that read or write it.
    """
    before: set[fx.Node] = set()
    for node in module.graph.nodes:
        for target in targets(node):
            if target.op == "get_attr":
                yield set(target.users)
            else:
                memory = aliases(target)
                yield memory | {node} | {user for each in memory for user in each.users} & before
        before.add(node)


def _memories(graph: fx.Graph) -> list[_Memory]:
    """Returns the memory that operators write into, unless it is a buffer's."""
    base, places, unknown = dict[fx.Node, fx.Node](), dict[int, fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        source = source_of(node)
        place = memory_of(node)
        viewed = source is not None and place is not None and place == memory_of(source)
        if source is not None and (viewed or source in declared(node)):
            base[node] = base[source]
            continue
        base[node] = node if place is None else places.setdefault(place, node)
        if base[node] is not node:  # a view, but nobody knows of what kind
            unknown.add(base[node])
    needing = needing_gradients(graph)
    changed = {base[target]: None for node in graph.nodes for target in targets(node)}
    return [
        _Memory(first, [node for node in base if base[node] is first], first in needing)
        for first in changed
        if first.op != "get_attr" and first not in unknown
    ]


class _Memory:
    """The value `base` and all that share its memory: `members`, in order.

    While it is replaced, `chains` has the views that lead from the base to each value, and `shown`
    by such views what has the contents now.
    """

    def __init__(self, base: fx.Node, members: list[fx.Node], needs_gradient: bool) -> None:
        self.base, self.graph, self.needs_gradient = base, base.graph, needs_gradient
        self.chains: dict[fx.Node, tuple[fx.Node, ...]] = {base: ()}
        for node in members[1:]:
            source = source_of(node)
            assert source is not None
            own_view = () if any(True for _ in declared(node)) else (node,)
            self.chains[node] = self.chains[source] + own_view
        self.shown: dict[tuple[fx.Node, ...], fx.Node] = {(): base}
        self.writes = 0
        self.read_after: dict[fx.Node, int] = {}

    def can_be_replaced(self) -> bool:
        """Tells whether what is written into the memory can be known as new values."""
        for node in self.graph.nodes:
            changed = [target for target in targets(node) if target in self.chains]
            if changed and (changed != [node.args[0]] or _functional(node.target) is None):
                return False
            for view in (view for target in changed for view in self.chains[target]):
                detached = view.target is _DETACH and self.needs_gradient
                if detached or not can_be_replaced(view):
                    return False
        return True

    def replace(self) -> None:
        for node in list(self.graph.nodes):
            writes = [target for target in declared(node) if target in self.chains]
            chain = self.chains.get(writes[0] if writes else node)
            for value in [value for value in node.all_input_nodes if value in self.chains]:
                node.replace_input_with(value, self._now(self.chains[value], node))
                self.read_after[node] = self.writes
            if chain is None or node is self.base:
                continue
            if writes:
                self._replace_write(node, chain)
            elif self._is_current(node):
                self.shown[chain] = node

    def _now(self, chain: tuple[fx.Node, ...], reader: fx.Node) -> fx.Node:
        """Returns what shows the contents through these views when `reader` reads them."""
        if chain not in self.shown:
            value, view = self._now(chain[:-1], reader), chain[-1]
            with self.graph.inserting_before(reader):
                self.shown[chain] = view_again(
                    view, value, view if reader.op == "output" else reader
                )
        return self.shown[chain]

    def _is_current(self, view: fx.Node) -> bool:
        """Tells whether nothing was written since its operator, such as `chunk`, ran."""
        several = view.args[0] if view.target is operator.getitem else view
        return isinstance(several, fx.Node) and self.read_after.get(several, 0) == self.writes

    def _replace_write(self, node: fx.Node, chain: tuple[fx.Node, ...]) -> None:
        """Puts the new value in the place of what is written, and in what that is a view of."""
        before = [self._now(chain[:length], node) for length in range(len(chain) + 1)]
        with self.graph.inserting_before(node):
            value = after = _new_value(node, before[-1])
            self.shown, self.writes = {chain: value}, self.writes + 1
            for length in reversed(range(len(chain))):
                after = replaced(before[length], chain[length], after, node)
                self.shown[chain[:length]] = after
        self.chains[value] = chain
        node.replace_all_uses_with(value)
        self.graph.erase_node(node)


def _new_value(node: fx.Node, before: fx.Node) -> fx.Node:
    """Adds the result of the operator in place as a new value, of the same type and shape."""
    graph, old, target = node.graph, before.meta["val"], _functional(node.target)
    if node.target is _aten.copy_.default:
        source = node.args[1]
        if source is before:
            return before
        assert isinstance(source, fx.Node)
        value = _converted(source, old, node)
        if value.meta["val"].shape != old.shape:
            value = emit(graph, _aten.expand.default, (value, list(old.shape)), {}, node)
        layout = {"memory_format": torch.contiguous_format} if old.is_contiguous() else {}
        return emit(graph, _aten.clone.default, (value,), layout, node)
    if target in _OTHER_NAMES.values():  # whose derivative, zero, is not implemented
        before = emit(graph, _DETACH, (before,), {}, node)
    value = emit(graph, target, (before, *_all_arguments(node)[1:]), node.kwargs, node)
    return _converted(value, old, node)


def _all_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Returns its arguments by place, those too that are left out since they have a default: what
    replaces `bernoulli_` has none.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    places = [each for each in node.target._schema.arguments if not each.kwarg_only]
    rest = (each for each in places[len(node.args) :] if each.has_default_value())
    return *node.args, *(each.default_value for each in rest if each.name not in node.kwargs)


def _converted(value: fx.Node, old: Tensor, like: fx.Node) -> fx.Node:
    if value.meta["val"].dtype == old.dtype:
        return value
    return emit(value.graph, _aten.to.dtype, (value, old.dtype), {}, like)


def _functional(target: object) -> torch._ops.OpOverload | None:
    """Returns `aten.relu.default` for `aten.relu_.default`, or None if there is none."""
    if target in _OTHER_NAMES or not isinstance(target, torch._ops.OpOverload):
        return _OTHER_NAMES.get(target)
    name = target._schema.name.partition("::")[2]
    packet = getattr(_aten, name.removesuffix("_"), None)
    if not name.endswith("_") or name in _RESIZING:
        return None
    return getattr(packet, target._overloadname, None)
