"""What the model returns for the microbatches of a minibatch, put together on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedream.graph.errors import UserError
from pipedream.runtime.engine.evaluation import EvaluationExecutor
from pipedream.runtime.engine.minibatch_state import MinibatchState
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.schedule.action import Action


@dataclass
class OutputExecutor(EvaluationExecutor):
    """Evaluates a stage, and keeps what the last one returns for each microbatch; with the loss
    only if it is `losing`.
    """

    losing: bool = True
    returned: dict[int, Any] = field(default_factory=dict)

    def _take_outputs(
        self,
        action: Action,
        state: MinibatchState,
        stage_module: StageModule,
        known: Mapping[str, Tensor],
    ) -> None:
        output = stage_module.output(known)
        self.returned[action.minibatch] = pytree.tree_map_only(Tensor, lambda x: x.cpu(), output)
        if self.losing:
            super()._take_outputs(action, state, stage_module, known)


def together(returned: Mapping[int, Any], sizes: Sequence[int], parts: Sequence[float]) -> Any:
    """The output of a minibatch, from those that this rank has of its microbatches, on all ranks.

    `sizes`: the examples of each microbatch; `parts`: how much each counts in a scalar, such as a
    loss. Raises UserError if a tensor does not have the examples as its first dimension.
    """
    every: list[dict[int, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, dict(returned))
    all_parts = {number: each for there in every for number, each in there.items()}
    flat = [pytree.tree_flatten(all_parts[number]) for number in range(len(sizes))]
    leaves = [_joined(each, sizes, parts) for each in zip(*(a for a, _ in flat), strict=True)]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _joined(leaves: Sequence[Any], sizes: Sequence[int], parts: Sequence[float]) -> Any:
    if not isinstance(leaves[0], Tensor):
        return leaves[0]
    if all(leaf.dim() == 0 for leaf in leaves):
        pairs = zip(leaves, parts, strict=True)
        return torch.stack([leaf * part for leaf, part in pairs if part]).sum()
    if any(not leaf.dim() or len(leaf) != n for leaf, n in zip(leaves, sizes, strict=True)):
        shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
        raise UserError(
            f"the model returns tensors {shapes} for microbatches of {', '.join(map(str, sizes))}"
            " examples: what it returns is to have the examples as its first dimension, or give"
            " microbatches=1"
        )
    return torch.cat(list(leaves))
