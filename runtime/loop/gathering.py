"""The whole model and the whole state of its optimizer, of which each rank has its own part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils import _pytree as pytree


def gather_tensors(model: nn.Module, own: Mapping[str, Tensor], device: torch.device) -> None:
    """Brings all parameters and buffers of the model up to date, on all ranks, which all call this.
    `own`: those that this rank has up to date.
    """
    names_of_ranks = of_all_ranks(list(own))
    owner = {
        name: rank for rank, names in reversed(list(enumerate(names_of_ranks))) for name in names
    }
    known = dict(model.named_parameters()) | dict(model.named_buffers())
    for name in sorted(owner.keys() & known.keys()):
        value = own.get(name, known[name]).detach().to(device).contiguous()
        dist.broadcast(value, owner[name])
        if name not in own:
            known[name].data.copy_(value)


def whole_state(optimizer: Any, own: Collection[Parameter] | None) -> dict[str, Any]:
    """`optimizer.state_dict()` as one process would have it, on all ranks, which all call this.
    `own`: the parameters that this rank trains; None if nobody has trained any yet.
    """
    whole: dict[str, Any] = optimizer.state_dict()
    trained = None if own is None else {id(parameter) for parameter in own}
    numbered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    here = {
        number: pytree.tree_map_only(Tensor, lambda tensor: tensor.cpu(), state)
        for number, state in whole["state"].items()
        if trained is None or id(numbered[number]) in trained
    }
    states = reversed(of_all_ranks(here))
    merged = {number: state for there in states for number, state in there.items()}
    return {**whole, "state": dict(sorted(merged.items()))}


def of_all_ranks(here: Any) -> list[Any]:
    """Returns what each rank has, on all ranks, which all call this."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, here)
    return every
