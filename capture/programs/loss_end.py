"""The loss as the end of the last stage's passes, where the devices of a mesh share the stage.

What the model returns then need not be whole on each of them: a loss is divided like any operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedream.capture.captured import OutSpec, rebuild
from pipedream.capture.loss import Loss
from pipedream.capture.programs.joint import CannotDivide, End
from pipedream.capture.segment import Segment

LOSS = "the loss"
"""How the value is called among those of the stage, which have no such names."""


@dataclass(frozen=True)
class Target:
    """Holds the `tensors` of a target, named like values of a stage, in the structure `spec`."""

    tensors: Mapping[str, Tensor]
    spec: pytree.TreeSpec

    @staticmethod
    def of(target: Any, device: torch.device | None = None) -> Target | None:
        """Makes the target on the device, if one is given. None if it has anything but tensors:
        that would be the same in all minibatches.
        """
        leaves, spec = pytree.tree_flatten(target)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            return None
        tensors = (leaf if device is None else leaf.to(device) for leaf in leaves)
        return Target({f"target {number}": leaf for number, leaf in enumerate(tensors)}, spec)

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """Returns what two targets have in common for which the same operators run."""
        return str(self.spec), *((tuple(x.shape), x.dtype) for x in self.tensors.values())


@dataclass(frozen=True)
class LossEnd:
    """`loss` of what the model returns: the values `returned`, in the structure `out_spec`."""

    loss: Loss
    returned: Sequence[str]
    out_spec: OutSpec

    def inputs(self, piece: Segment, target: Target) -> tuple[str, ...]:
        """Returns the inputs of the stage with its loss: those of the piece, what the model returns
        and no operator of the stage reads or computes, and the tensors of the target.
        """
        in_piece = {*piece.inputs, *piece.outputs}
        passed_on = dict.fromkeys(name for name in self.returned if name not in in_piece)
        return (*piece.inputs, *passed_on, *target.tensors)

    def end(self, piece: Segment, inputs: Sequence[str], target: Target) -> End:
        """Computes the loss of the outputs of the piece, and of `inputs`, for such a target."""
        names, spec = list(target.tensors), target.spec

        def end(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> Sequence[Tensor]:
            known = dict(zip(inputs, values, strict=True))
            known |= zip(piece.outputs, outputs, strict=True)
            output = rebuild([known[name] for name in self.returned], self.out_spec)
            loss = self.loss(output, pytree.tree_unflatten([known[n] for n in names], spec))
            if loss.dtype == torch.float16:
                raise CannotDivide("its sum in half precision would be too large for a mean")
            return [loss]

        return end
