"""A joint graph in which operators make new values and write into buffers alone.

What autograd records has operators in place, too: those that composite ones such as a GRU consist
of, those of the user's code, and sums of the backward pass. The parts of the graph run in another
order than the trace, so a value has to stay what it was. torch.func.functionalize makes it so; what
is left to write is a buffer's new value, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from pipedream.capture.fake_values import fake_mode_of
from pipedream.capture.rewrites.writes import changes_something, declared


def make_functional(traced: fx.GraphModule) -> fx.GraphModule:
    """Returns the same graph without writes but into placeholders, which come after what read them.
    What the nodes' meta says is kept.
    """
    if all(each.op == "placeholder" for node in traced.graph.nodes for each in declared(node)):
        return traced
    inputs = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder", sort=True)]

    def run(*values: Tensor) -> Any:
        return _Noting(traced).run(*values)

    with fake_mode_of(inputs), torch.no_grad():
        functional = make_fx(functionalize(run))(*inputs)
    _note_last_writes(functional, traced)
    functional.graph.eliminate_dead_code(changes_something)
    functional.recompile()
    return functional


class _Noting(fx.Interpreter):
    """Gives the operators that are recorded the meta of the one that runs."""

    def run_node(self, n: fx.Node) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        graph = mode.tracer.graph
        before = len(graph.nodes)
        result = super().run_node(n)
        for node in list(graph.nodes)[before:]:
            _add_meta(node, n.meta)
        return result


def _add_meta(node: fx.Node, meta: Mapping[str, Any]) -> None:
    for name, value in meta.items():
        node.meta.setdefault(name, value)


def _note_last_writes(functional: fx.GraphModule, traced: fx.GraphModule) -> None:
    """The new values of inputs are written at the end, by no operator of the old graph: they belong
    to the last that wrote there.
    """
    writers = [node for node in traced.graph.nodes if any(True for _ in declared(node))]
    for node in functional.graph.nodes:
        if any(True for _ in declared(node)):
            source = node.args[1]
            known = source.meta if source.op == "call_function" else writers[-1].meta
            _add_meta(node, {name: value for name, value in known.items() if name != "val"})
