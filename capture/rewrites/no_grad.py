"""Puts the operators of regions without gradient (`torch.no_grad()`) among the others of a graph.

torch.export makes a region a graph of its own, called by an operator. There nobody sees what is
written into buffers. Among the others the operators of a region read what may need a gradient
through `detach`, so that what they compute needs none.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipedream.capture.rewrites.writes import aliases, attribute, body, declared, operands, targets

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
_DETACH = torch.ops.aten.detach.default


def inline_no_grad(module: fx.GraphModule) -> None:
    """Replaces the regions, in place, also in regions under autocast."""
    for name, part in list(module.named_modules()):
        if name and isinstance(part, fx.GraphModule):
            _Inlining(part, all_may_need=True).run()
    _Inlining(module).run()


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Makes `torch.inference_mode()`, which torch.export overlooks, mean `torch.no_grad()`."""
    mode: Any = torch.inference_mode
    enter, leave, entered = mode.__enter__, mode.__exit__, list[Any]()

    def begin(self: Any) -> None:
        entered.append(torch.no_grad() if self.mode else torch.set_grad_enabled(True))
        entered[-1].__enter__()

    def end(self: Any, *error: Any) -> None:
        entered.pop().__exit__(*error)

    mode.__enter__, mode.__exit__ = begin, end
    try:
        yield
    finally:
        mode.__enter__, mode.__exit__ = enter, leave


class _Inlining:
    """A new graph of the module. `all_may_need`: what it is given may need gradients."""

    def __init__(self, module: fx.GraphModule, all_may_need: bool = False) -> None:
        self.module, self.all_may_need = module, all_may_need
        self.graph = fx.Graph(owning_module=module)
        self.may_need: set[fx.Node] = set()

    def run(self) -> None:
        if self.module.graph.find_nodes(op="call_function", target=_REGION):
            self._emit(self.module, {}, True)
            self.module.graph = self.graph
            self.module.recompile()

    def _emit(
        self, part: fx.GraphModule, known: Mapping[fx.Node, Any], gradients: bool
    ) -> list[Any]:
        """Adds the operators of `part` with `known` placeholders; returns their results."""
        copies, detached = dict(known), dict[fx.Node, fx.Node]()

        def read(node: fx.Node) -> Any:
            value = copies[node]
            if gradients or not isinstance(value, fx.Node) or value not in self.may_need:
                return value
            if value not in detached:
                detached[value] = self.graph.call_function(_DETACH, (value,))
                detached[value].meta = {**meta, "val": value.meta.get("val")}
            return detached[value]

        for node in part.graph.nodes:
            meta = node.meta
            if node.target is _REGION:
                copies[node] = self._inlined(node, copies)
            elif node.target is operator.getitem and isinstance(copies[node.args[0]], list):
                copies[node] = copies[node.args[0]][node.args[1]]
            elif node not in copies and node.op != "output" and not _is_inlined(node):
                copies[node] = self._copy(node, read, part)
                if not gradients and node.args and node.args[0] in declared(node):
                    copies[node] = copies[node.args[0]]  # which is still what it was for autograd
        (end,) = part.graph.find_nodes(op="output")
        results = fx.map_arg(end.args[0], copies.__getitem__)
        if part is self.module:
            self.graph.output(results).meta = dict(end.meta)
        return list(results)

    def _inlined(self, node: fx.Node, copies: Mapping[fx.Node, Any]) -> list[Any]:
        enabled, part = bool(node.args[0]), body(node)
        assert part is not None
        arguments = [copies[each] if isinstance(each, fx.Node) else each for each in operands(node)]
        inside = part.graph.find_nodes(op="placeholder", sort=True)
        return self._emit(part, dict(zip(inside, arguments, strict=True)), enabled)

    def _copy(self, node: fx.Node, read: Any, part: fx.GraphModule) -> fx.Node:
        """Notes what may need a gradient: parameters, and what is computed of such values."""
        value = attribute(node) if node.op == "get_attr" else None
        copy = self.graph.node_copy(node, read)
        if isinstance(value, fx.GraphModule) and part is not self.module:
            copy.target = f"{node.target}_of_{copy.name}"
            setattr(self.module, copy.target, value)
        self.may_need |= _needing(copy, self.may_need, self.all_may_need)
        return copy


def _is_inlined(node: fx.Node) -> bool:
    """Tells whether it is the graph of a region."""
    return (
        node.op == "get_attr"
        and isinstance(attribute(node), fx.GraphModule)
        and all(user.target is _REGION for user in node.users)
    )


def needing_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Returns the values of a graph without regions that may need a gradient."""
    needing = set[fx.Node]()
    for node in graph.nodes:
        needing |= _needing(node, needing, False)
    return needing


def _needing(node: fx.Node, known: Set[fx.Node], inputs_may: bool) -> set[fx.Node]:
    """Returns what may need a gradient because of `node`: its result, if it is a parameter or
    computed of what is `known` to, and what it writes into. `inputs_may`: whether inputs may, too.
    """
    parameter = node.op == "get_attr" and isinstance(attribute(node), nn.Parameter)
    reads = not known.isdisjoint(node.all_input_nodes) and node.target is not _DETACH
    inputs_may = inputs_may and node.op == "placeholder"
    if not parameter and not (_differentiable(node) and (reads or inputs_may)):
        return set()
    return {node}.union(*(aliases(target) for target in targets(node)))


def _differentiable(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return True
    return value.is_floating_point() or value.is_complex()
