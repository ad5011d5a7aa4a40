"""The first minibatch of a loop of the user's own, compared with the captured model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipedream.capture.checks.equivalence import gradient_of
from pipedream.capture.loss import Loss
from pipedream.graph.errors import UserError
from pipedream.runtime.loop.gathering import of_all_ranks
from pipedream.runtime.loop.split_minibatch import SplitMinibatch
from pipedream.runtime.loop.staged_model import StagedModel
from pipedream.runtime.selfcheck.fingerprint import Fingerprint, fingerprint
from pipedream.runtime.selfcheck.reference import (
    Expected,
    Reference,
    buffer_on,
    loss_of,
    worst_of,
)
from pipedream.schedule.action import Worker


def expect(
    staged: StagedModel, minibatch: SplitMinibatch, loss: Loss
) -> Mapping[str, Expected] | None:
    """Returns the figures of a minibatch, which rank 0 computes for all; None if it has no room.

    To be called by all ranks, where each has the whole model up to date.
    """
    figures = [_figures(staged, minibatch, loss) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(figures, 0, device=staged.forms.rng.device)
    return figures[0]


def _figures(staged: StagedModel, minibatch: SplitMinibatch, loss: Loss) -> Any:
    forms, captured = staged.forms, staged.captured
    names = frozenset(name for name, _ in forms.model.named_buffers())
    known = captured, forms.plan, names, loss, forms.rng, forms.tolerance
    reference = Reference.of(*known, reorders=forms.backend is not None)
    if reference is None:
        return None
    captures = (forms.captures[call.kind] for call in minibatch.calls)
    numbered = dict(enumerate(zip(captures, minibatch.batches, strict=True)))
    return reference.round(numbered)


def compare(
    expected: Mapping[str, Expected],
    staged: StagedModel,
    workers: Sequence[Worker],
    losses: Mapping[int, Tensor],
    gradients: Iterable[Mapping[str, Tensor]],
) -> None:
    """Raises UserError on all ranks if one of the figures of this rank's `workers` is too far from
    what is expected on any of them.
    """
    figures: dict[str, Fingerprint | None] = {
        loss_of(number): fingerprint(loss) for number, loss in losses.items()
    }
    for stage, replica in workers:
        for name, parameter in staged.parameters(stage).items():
            if parameter.requires_grad:
                figures[gradient_of(name)] = None
        for name, buffer in staged.buffers(stage).items():
            figures[buffer_on(name, replica)] = fingerprint(buffer)
    for own in gradients:
        figures |= {gradient_of(name): fingerprint(each) for name, each in own.items()}
    worst = worst_of(expected, figures, f"rank {dist.get_rank()}")
    parts, message = max(of_all_ranks(worst))
    if parts > 1:
        raise UserError(message)
