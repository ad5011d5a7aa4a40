"""Dropout without its draws: a compiler gets a module in one piece, and random numbers stay those
that operators draw themselves, after their seed.

Each draw becomes an input of the module: the factors of dropout, 0 or 1 / (1 - p), which dropout
itself makes of ones, in the order in which the memory of its input lies; on GPUs, whose dropout
multiplies in a wider type, which of them are kept. On CPUs attention with dropout is products of
matrices, and is written so, with the factors of its weights. Of operators that only draw, such as
`rand_like` and the `bernoulli` of stochastic depth, the numbers themselves are the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipedream.capture.compute_settings import placed
from pipedream.capture.rewrites.arguments import by_name
from pipedream.capture.rewrites.writes import is_draw

_DROPOUT = torch.ops.aten.dropout.default
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_RECURRENT = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload in ("input", "data")
)
_ONLY_DRAWS = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("bernoulli", "p"),
        ("normal_functional", "default"),
        ("rand", "default"),
        ("rand_like", "default"),
        ("randn", "default"),
        ("randn_like", "default"),
    )
)
"""What they give depends on the shape and type of what they are given, not on its elements."""
_EXACT = torch.float32, torch.float64
"""Types whose attention is computed in them; that in others is widened, and its draws with it."""


@dataclass(frozen=True)
class Draw:
    """Dropout of ones with probability `p`, after `seed` if there is one."""

    seed: nn.Module | None
    p: float
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __call__(self) -> Tensor:
        if self.seed is not None:
            self.seed()
        memory = torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=self.device)
        factors = torch.dropout(memory.fill_(1), self.p, True)
        return factors if self.device.type == "cpu" else factors != 0


@dataclass(frozen=True)
class OnlyDraw:
    """`operator(*args, **kwargs)` after `seed` if there is one, with tensors `like` them in place
    of nodes.
    """

    seed: nn.Module | None
    operator: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: torch.device

    def __call__(self) -> Tensor:
        if self.seed is not None:
            self.seed()

        def like(node: fx.Node) -> Tensor:
            value = node.meta["val"]
            sizes = tuple(value.shape), tuple(value.stride())
            return torch.empty_strided(*sizes, dtype=value.dtype, device=self.device)

        args, kwargs = fx.map_arg((self.args, dict(self.kwargs)), like)
        args, kwargs = placed((args, kwargs), self.device)
        return self.operator(*args, **kwargs)


@dataclass(frozen=True)
class DrawnApart:
    """`module` is given, after its own inputs, what each of the `draws` gives."""

    module: fx.GraphModule
    draws: Sequence[Draw | OnlyDraw]

    @staticmethod
    def of(module: fx.GraphModule, device: torch.device) -> DrawnApart:
        """Takes what it can of a copy of the module, with the same tensors; draws of regions within
        stay there. `device`: where it runs.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.output(graph.graph_copy(module.graph, copies))
        module, draws = fx.GraphModule(module, graph), list[Draw | OnlyDraw]()
        graph = module.graph
        for node in filter(is_draw, list(graph.nodes)):
            draw = _draw(node, device)
            if draw is None:
                continue
            last = [each for each in graph.nodes if each.op == "placeholder"][-1:]
            with graph.inserting_after(*last) if last else graph.inserting_before():
                drawn = graph.placeholder(f"drawn_{node.name}")
            _take(node, drawn)
            draws.append(draw)
        module.recompile()
        return DrawnApart(module, draws)

    def values(self) -> Iterator[Tensor]:
        """Draws."""
        return (draw() for draw in self.draws)


def _draw(node: fx.Node, device: torch.device) -> Draw | OnlyDraw | None:
    """Returns what draws the random numbers of this operator; None if only it itself can."""
    given = [source.meta.get("val") for source in node.all_input_nodes]
    if not all(isinstance(value, Tensor) for value in given):
        return None
    if node.target in _ONLY_DRAWS:
        return OnlyDraw(_seed(node), node.target, node.args, node.kwargs, device)  # type: ignore[arg-type]
    p = probability(node)
    if p is None or p in (0.0, 1.0) or node.target in _RECURRENT:
        return None
    if node.target is _DROPOUT:
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        ends = tuple(value.shape), tuple(value.stride()), value.dtype, device
        return Draw(_seed(node), p, *ends)
    query, key = (node.args[k].meta["val"] for k in (0, 1))  # type: ignore[union-attr]
    scale, result = by_name(node)["scale"], node.meta["val"]
    exact = query.dtype in _EXACT and result.dtype == query.dtype  # no autocast in between
    if device.type != "cpu" or not exact or (scale is not None and scale <= 0):
        return None
    sizes = (*result.shape[:-1], key.shape[-2])
    strides = torch.empty(sizes, device="meta").stride()
    return Draw(_seed(node), p, sizes, strides, query.dtype, device)


def probability(node: fx.Node) -> float | None:
    """Returns that of an element to be dropped; None for operators that draw something else."""
    if node.target is _DROPOUT:
        _, p, trains = node.args
        return float(p) if trains else 0.0  # type: ignore[arg-type]
    if node.target is ATTENTION:
        return float(by_name(node)["dropout_p"])
    if node.target in _RECURRENT:
        given = by_name(node)
        return float(given["dropout"]) if given["train"] else 0.0
    return None


def _take(node: fx.Node, drawn: fx.Node) -> None:
    """Puts in the place of the operator one that is given what it draws, and erases its seed."""
    graph = node.graph
    _erase_seed(node)
    if node.target in _ONLY_DRAWS:
        drawn.meta = dict(node.meta)
        node.replace_all_uses_with(drawn)
        graph.erase_node(node)
        return
    with graph.inserting_before(node):
        if node.target is _DROPOUT:
            made = graph.call_function(_dropped, (node.args[0], drawn, probability(node)))
        else:
            given = by_name(node)
            del given["dropout_p"]
            made = graph.call_function(_attention, (*given.values(), drawn))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _erase_seed(node: fx.Node) -> None:
    if _seed(node) is not None:
        node.graph.erase_node(node.prev)


def _dropped(x: Tensor, drawn: Tensor, p: float) -> Tensor:
    """Returns dropout of `x`; `drawn`: factors, or which elements are kept."""
    return torch.where(drawn, x * (1 / (1 - p)), 0) if drawn.dtype == torch.bool else x * drawn


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    factors: Tensor,
) -> Tensor:
    """Returns attention whose weights are multiplied by `factors`, step by step as torch does it in
    products of matrices.
    """
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        sizes = query.shape[-2], key.shape[-2]
        mask = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
        scores = scores + mask
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    weighted: Tensor = (weights * factors) @ value
    return weighted


def is_seed(node: fx.Node) -> bool:
    """Tells whether it calls a module without arguments, which seeds the draw after it."""
    return node.op == "call_module" and not node.args


def _seed(node: fx.Node) -> nn.Module | None:
    """Returns the module that is called right before to seed the generator, if there is one."""
    before, owner = node.prev, node.graph.owning_module
    return owner.get_submodule(str(before.target)) if owner and is_seed(before) else None
