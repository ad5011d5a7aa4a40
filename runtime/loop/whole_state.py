"""The state of an optimizer of the user's, of which each rank has that of its own parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree


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
    every: list[dict[int, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, here)
    merged = {number: state for there in reversed(every) for number, state in there.items()}
    return {**whole, "state": dict(sorted(merged.items()))}
