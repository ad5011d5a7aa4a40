"""What torch.compile is given of a module: without what it has been seen to compute wrong.

- Writes to buffers. Torch 2.13 forgets those to a single number in float64; and what a backward
  pass computes again of a buffer may find it changed. So the module gives the new contents, and
  whoever runs it writes them.
- Draws that cannot be made before (`drawn_apart`). Operators such as an LSTM with dropout are
  divided into others, which draw other numbers; they stay as they are.
- Results whose elements share memory, such as windows that overlap. Torch lays out their gradients
  in the same way, so that one overwrites the other. They get memory of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pipedream.capture.rewrites.drawn_apart import probability
from pipedream.capture.rewrites.writes import is_draw

_COPY = torch.ops.aten.copy_.default


def take_writes(module: fx.GraphModule) -> tuple[str, ...]:
    """Has the module give the new contents of buffers after its results, in place of writing them;
    returns the names of these buffers.
    """
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    contents: dict[str, fx.Node] = {}
    for write in [node for node in graph.nodes if _is_whole_write(node)]:
        buffer, value = write.args[:2]
        with graph.inserting_before(write):
            made = graph.call_function(torch.ops.aten.copy.default, (buffer, value))
        made.meta = dict(write.meta)
        write.replace_all_uses_with(made)
        contents[str(buffer.target)] = made
        for later in _after(write):
            for other in later.all_input_nodes:
                if other.op == "get_attr" and other.target == buffer.target:
                    later.replace_input_with(other, made)
        graph.erase_node(write)
    output.args = ((*output.args[0], *contents.values()),)
    module.recompile()
    return tuple(contents)


def _is_whole_write(node: fx.Node) -> bool:
    """Tells whether it writes all of a buffer."""
    if node.target is not _COPY or not isinstance(node.args[0], fx.Node):
        return False
    buffer = node.args[0]
    if buffer.op != "get_attr":
        return False
    return isinstance(operator.attrgetter(str(buffer.target))(node.graph.owning_module), Tensor)


def _after(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes that come after it, in order."""
    nodes = list(node.graph.nodes)
    return nodes[nodes.index(node) + 1 :]


def leave_draws(module: fx.GraphModule) -> None:
    """Keeps operators that draw out of what is compiled."""
    for node in module.graph.nodes:
        if is_draw(node) and probability(node) != 0.0:
            node.target = _as_it_is(node.target)
    module.recompile()


def _as_it_is(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns it as a function of its own: generated code calls operators by their names."""

    def alone(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    made: Callable[..., Any] = torch.compiler.disable(alone)  # type: ignore[no-untyped-call]
    return made


def in_own_memory(graph: fx.Graph, results: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the results, of those whose elements share memory copies; adds these at the end."""
    return [
        graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": _PACKED})
        if _overlaps(node.meta.get("val"))
        else node
        for node in results
    ]


_PACKED = torch.contiguous_format


def _overlaps(value: object) -> bool:
    """Tells whether elements may share memory."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.numel() < 2:
        return False
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
