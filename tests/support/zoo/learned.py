"""What a way of training leaves, and the way that anybody would write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.specimens import Inputs, Specimen, loss_of

UPDATES = 3
WHOLE = ((4, 4),) * UPDATES
"""Examples of each microbatch of each update."""
SMALLER = ((4, 4), (4, 3), (1,))

Named = dict[str, Tensor]


@dataclass
class Learned:
    """By update: the mean loss of its microbatches, what the model gave for each, the gradients. At
    the end: the parameters and the buffers, by name.
    """

    losses: list[float] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    parameters: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)


def optimizer(parameters: Sequence[Tensor]) -> torch.optim.Optimizer | None:
    """With momentum and decay, so that a gradient of zero is not none."""
    learning = [each for each in parameters if each.requires_grad]
    if not learning:
        return None
    return torch.optim.SGD(learning, lr=0.05, momentum=0.9, weight_decay=0.01)


def tensors_of(output: object) -> list[Tensor]:
    """Copies of all tensors in it."""
    leaves = pytree.tree_leaves(output)
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]


def owned(inputs: Inputs) -> Inputs:
    """Copies, that a model may write into."""
    own: Inputs = pytree.tree_map_only(Tensor, lambda tensor: tensor.clone(), inputs)
    return own


def plain(specimen: Specimen, sizes: Sequence[Sequence[int]] = WHOLE) -> Learned:
    """Three updates in a loop, each from the mean loss of its microbatches."""
    learned, model = Learned(), specimen.model()
    learning = optimizer(list(model.parameters()))
    for update, microbatches in enumerate(sizes):
        losses = []
        outputs: list[Tensor] = []
        for microbatch, examples in enumerate(microbatches):
            args, kwargs = specimen.call(update, microbatch, examples)
            output = model(*args, **kwargs)
            outputs += tensors_of(output)
            loss = loss_of(output)
            if loss.requires_grad:
                (loss / len(microbatches)).backward()
            losses.append(loss.item())
        learned.losses.append(sum(losses) / len(losses))
        learned.outputs.append(outputs)
        learned.gradients.append(_gradients(model))
        if learning is not None:
            learning.step()
            learning.zero_grad()
    _keep(model, learned)
    return learned


def evaluated(specimen: Specimen, sizes: Sequence[int] = (4, 3)) -> Learned:
    """What the model gives in eval mode, as it is at the beginning."""
    learned, model = Learned(), specimen.model().eval()
    for microbatch, examples in enumerate(sizes):
        args, kwargs = specimen.call(0, microbatch, examples)
        with torch.no_grad():
            output = model(*args, **kwargs)
            learned.losses.append(loss_of(output).item())
        learned.outputs.append(tensors_of(output))
    _keep(model, learned)
    return learned


def _gradients(model: nn.Module) -> Named:
    named = model.named_parameters()
    return {name: p.grad.detach().clone() for name, p in named if p.grad is not None}


def _keep(model: nn.Module, learned: Learned) -> None:
    learned.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    learned.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
