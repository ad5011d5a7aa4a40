"""Attention loses masks that hide nothing, and is told that it is causal where one says only that.

Models of transformers do so themselves where nobody exports them: with a mask all scores are
computed, of causal attention twice as many as need be, and kernels that take none cannot be used.
Exported, they compute the mask in each pass, from positions alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from pipedream.capture.rewrites.arguments import arguments, by_name
from pipedream.capture.rewrites.drawn_apart import ATTENTION

Instead = Literal["nothing", "causal"]

_MOST = 1 << 29
"""Bytes of a value that is computed to see what a mask is."""


def leave_out_masks(module: fx.GraphModule, fixed: Collection[fx.Node]) -> None:
    """Rewrites attention in place, and leaves out what only its masks were computed for. `fixed`:
    operators that give the same in each pass. Masks that depend on a buffer stay: a checkpoint may
    have another one.
    """
    instead: dict[fx.Node, Instead | None] = {}
    behind: set[fx.Node] = set()
    for node in module.graph.find_nodes(op="call_function", target=ATTENTION):
        given = by_name(node)
        mask = given["attn_mask"]
        if not isinstance(mask, fx.Node) or mask not in fixed:
            continue
        if mask not in instead:
            values = _computed(mask, fixed)
            value = values[mask]
            instead[mask] = None if value is None else in_place_of(value)
            behind.update(values)
        if (other := instead[mask]) is not None:
            given |= {"attn_mask": None, "is_causal": other == "causal"}
            schema = [argument for argument, _ in arguments(node)]
            node.args = tuple(given[each.name] for each in schema if not each.kwarg_only)
            node.kwargs = {each.name: given[each.name] for each in schema if each.kwarg_only}
    for node in reversed(module.graph.nodes):
        if node in behind and not node.users:
            module.graph.erase_node(node)


def in_place_of(mask: Tensor) -> Instead | None:
    """Returns what attention can be told in place of a mask; None if only the mask says it.

    A mask is True where a position sees another, or 0, where others have minus infinity, or the
    lowest number there is. Causal: each sees itself and those before it, and no other.
    """
    if mask.dtype == torch.bool:
        sees, hidden = mask, ~mask
    else:
        sees, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min
    if sees.all():
        return "nothing"
    rows, columns = mask.shape[-2:] if mask.dim() > 1 else (0, 1)
    if rows != columns:  # torch itself sees the first ones of the longer side
        return None
    causal = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    return "causal" if (sees == causal).all() and (hidden != causal).all() else None


def _computed(node: fx.Node, fixed: Collection[fx.Node]) -> dict[fx.Node, Tensor | None]:
    """Returns what a fixed operator gives, and those behind it; None if that depends on a buffer,
    or is too large.
    """
    values: dict[fx.Node, Tensor | None] = {}
    wanted = [node]
    while wanted:
        last = wanted[-1]
        missing = [each for each in last.all_input_nodes if each not in values]
        if last not in fixed or _is_large(last):
            values[last] = None
        elif missing:
            wanted += missing
            continue
        elif last not in values:
            values[last] = _result(last, values)
        wanted.pop()
    return values


def _result(node: fx.Node, values: Mapping[fx.Node, Tensor | None]) -> Tensor | None:
    if any(values[each] is None for each in node.all_input_nodes):
        return None
    with unset_fake_temporarily(), torch.no_grad():
        given: Any = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        compute: Any = node.target
        result: Tensor = compute(*given[0], **given[1])
        return result


def _is_large(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.nbytes > _MOST
