"""The forward and the backward pass of a module as one graph of ATen operators.

As AOTAutograd has it (torch's functorch, "joint graph"): autograd runs under a tracer, so what it
does backwards becomes operators like those of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from pipedream.capture.autograd_functions import SPACE
from pipedream.capture.fake_values import fake_mode_of
from pipedream.capture.programs.draws import HOOK, Draws, noting_seeds, take_draws
from pipedream.capture.rewrites.writes import changes_something, declared, is_draw

End: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""Of the outputs of a module and all inputs, what the passes give in the place of the outputs."""

_RENAMING = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class CannotDivide(Exception):
    """The passes of a module cannot be had as programs; says why."""


@dataclass(frozen=True)
class Joint:
    """`module` computes the outputs from the placeholders `weights` (parameters and buffers by
    name), `inputs` and `draws`, and the gradients from these and the placeholders `tangents`: the
    gradients of the outputs with the numbers `differentiable`. It writes into buffers alone.

    `input_gradients`: None for an input that wants none or has none; so `weight_gradients`, of the
    parameters.
    """

    module: fx.GraphModule
    weights: Mapping[str, fx.Node]
    inputs: Sequence[fx.Node]
    draws: Draws
    tangents: Sequence[fx.Node]
    differentiable: Sequence[int]
    outputs: Sequence[fx.Node]
    input_gradients: Sequence[fx.Node | None]
    weight_gradients: Mapping[str, fx.Node | None]


def joint(
    module: fx.GraphModule,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    wants: Sequence[bool],
    precision: AbstractContextManager[Any],
    end: End | None = None,
) -> Joint:
    """Traces `module(*inputs)`, which gives a tuple of tensors, with parameters and buffers
    `state`, which may have some that it does not read. `wants`: of which inputs the gradients are
    to be computed. `precision`: the context of the forward pass, which is entered twice. `end`
    comes after it, in the same; inputs after those of the module are for it alone.

    Nothing is computed: only shapes, types and whether gradients are required matter. Raises
    CannotDivide.
    """
    _check(module)
    taken = None if end is None else len(module.graph.find_nodes(op="placeholder"))
    names = list(state)
    own = (each(remove_duplicate=False) for each in (module.named_parameters, module.named_buffers))
    held = {name for name, _ in chain.from_iterable(own)}
    learned = [name for name in names if state[name].requires_grad]
    differentiable: list[int] = []
    counts: list[int] = []

    def passes(weights: list[Tensor], given: list[Tensor]) -> list[Tensor]:
        leaves = {
            name: weight.detach().requires_grad_(name in learned)
            for name, weight in zip(names, weights, strict=True)
        }
        input_leaves = [x.detach().requires_grad_(w) for x, w in zip(given, wants, strict=True)]
        with noting_seeds(), precision:
            read = {name: leaf for name, leaf in leaves.items() if name in held}
            results: Sequence[Tensor] = functional_call(module, read, tuple(input_leaves[:taken]))
            if end is not None:
                results = end(results, input_leaves)
        differentiable[:] = [k for k, result in enumerate(results) if result.requires_grad]
        ends = [results[k] for k in differentiable]
        wanted = [
            *(x for x in input_leaves if x.requires_grad),
            *(leaves[name] for name in learned),
        ]
        tangents = _tangents(ends)
        gradients: Sequence[Tensor | None] = [None] * len(wanted)
        if tangents and wanted:
            gradients = torch.autograd.grad(ends, wanted, tangents, allow_unused=True)
        counts[:] = [len(results), len(wanted) - len(learned)]
        return [*(result.detach() for result in results), *gradients]  # type: ignore[list-item]

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = pytree.tree_map(mode.from_tensor, [[t.detach() for t in state.values()], list(inputs)])
    try:
        with mode, torch.enable_grad(), _use_lazy_graph_module(True):
            traced = make_fx(passes)(fake[0], fake[1])
        _drop_renaming(traced)
        traced = _make_functional(traced)
    except Exception as error:  # whatever operators raise that cannot be traced
        raise CannotDivide(f"{type(error).__name__}: {error}") from error
    if end is not None and not all(HOOK in n.meta for n in traced.graph.nodes if is_draw(n)):
        raise CannotDivide("the loss draws random numbers")
    divided = _named(traced, names, learned, wants, differentiable, counts)
    _check_writes(divided)
    return divided


def _tangents(ends: Sequence[Tensor]) -> list[Tensor]:
    """Returns gradients of the `ends` of a forward pass that is being traced, as placeholders."""
    if not ends:
        return []
    mode = get_proxy_mode()
    assert mode is not None
    graph = mode.tracer.graph
    with disable_proxy_modes_tracing():
        tangents = [torch.empty_like(end) for end in ends]
    last = graph.find_nodes(op="placeholder", sort=True)[-1]
    for index, tangent in enumerate(tangents, start=1):
        proxy = mode.tracer.create_proxy("placeholder", f"tangents_{index}", (), {})
        track_tensor_tree(tangent, proxy, constant=None, tracer=mode.tracer)
        last.append(proxy.node)
        last = proxy.node
    return tangents


def _check_writes(joint: Joint) -> None:
    """The parts of the graph run at other times than the trace: what is read must not change."""
    buffers = {node for name, node in joint.weights.items() if name not in joint.weight_gradients}
    for node in joint.module.graph.nodes:
        if not buffers.issuperset(declared(node)):
            raise CannotDivide(f"{node.target} writes into what is no buffer")


def _check(module: fx.GraphModule) -> None:
    """A trace would keep what a user's autograd function does with these tensors alone."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == SPACE:
                name = str(node.target).split(".")[1]
                raise CannotDivide(f"the autograd function {name} is code of the user's")


def _drop_renaming(traced: fx.GraphModule) -> None:
    """Removes operators that only rename: without autograd, a detached tensor is the tensor."""
    for node in list(traced.graph.nodes):
        if node.target in _RENAMING:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code(changes_something)


def _make_functional(traced: fx.GraphModule) -> fx.GraphModule:
    """Returns the same graph without writes but into placeholders, which come after what read them.
    What the nodes' meta says is kept.

    What autograd records has operators in place, too: those that composite ones such as a GRU
    consist of, those of the user's code, and sums of the backward pass. The parts of the graph run
    in another order than the trace, so a value has to stay what it was. What torch.func's
    functionalize leaves to write is a buffer's new value, at the end.
    """
    if all(each.op == "placeholder" for node in traced.graph.nodes for each in declared(node)):
        return traced
    inputs = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder", sort=True)]

    def run(*values: Tensor) -> Any:
        return _Noting(traced).run(*values)

    with fake_mode_of(inputs), torch.no_grad(), _use_lazy_graph_module(True):
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
        last = next(reversed(graph.nodes))
        result = super().run_node(n)
        for node in takewhile(lambda each: each is not last, reversed(graph.nodes)):
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


def _named(
    traced: fx.GraphModule,
    names: Sequence[str],
    learned: Sequence[str],
    wants: Sequence[bool],
    differentiable: Sequence[int],
    counts: Sequence[int],
) -> Joint:
    placeholders = traced.graph.find_nodes(op="placeholder", sort=True)
    draws = take_draws(traced)
    (end,) = traced.graph.find_nodes(op="output")
    results = list(end.args[0])
    outputs, wanted = counts
    gradients = iter(results[outputs : outputs + wanted])
    inputs = len(names) + len(wants)
    return Joint(
        traced,
        dict(zip(names, placeholders[: len(names)], strict=True)),
        placeholders[len(names) : inputs],
        draws,
        placeholders[inputs:],
        tuple(differentiable),
        results[:outputs],
        [next(gradients) if want else None for want in wants],
        dict(zip(learned, results[outputs + wanted :], strict=True)),
    )
