"""Reduce-scatter and all-gather over a group, which move half the bytes of an all-reduce each.

With gloo they are messages from each rank to every other: its own reduce-scatter is an all-reduce,
and its all-gather takes more than twice as long (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.comm.messages import begin_messages, lost
from pipedream.comm.transport import Transport

_NO_ANSWER = "a replica of this stage does not answer"

# Before torch 2.13 they had other names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Exchange:
    """One that is under way: `result` is where it ends, `target` where it is wanted; the `terms` of
    a sum are yet to be added.
    """

    target: Tensor
    result: Tensor
    works: Sequence[Any]
    terms: Sequence[Tensor] = ()

    def wait(self) -> None:
        """Waits until `target` has it. Raises PeerLost."""
        with lost(_NO_ANSWER):
            for work in self.works:
                work.wait()
        for term in self.terms:
            self.result.add_(term)
        if self.result.device != self.target.device:
            self.target.copy_(self.result, non_blocking=True)


def begin_scattered_sum(transport: Transport, matrix: Tensor, group: dist.ProcessGroup) -> Exchange:
    """Begins to replace, in a matrix [ranks, n], the row of this rank by the sum of that row over
    the group. Raises PeerLost.
    """
    matrix, here = _real(matrix), dist.get_rank(group)
    rows, terms = _staged(transport, matrix), []
    with lost(_NO_ANSWER):
        if transport.is_queued:
            works = [_reduce_scatter(rows[here], rows.view(-1), group=group, async_op=True)]
        else:
            peers = _peers(group, here)
            terms = [torch.empty_like(rows[here]) for _ in peers]
            received = [(rank, term) for (_, rank), term in zip(peers, terms, strict=True)]
            works = begin_messages(group, [(rank, rows[at]) for at, rank in peers], received)
    return Exchange(matrix[here], rows[here], works, terms)


def begin_gather(transport: Transport, matrix: Tensor, group: dist.ProcessGroup) -> Exchange:
    """Begins to fill a matrix [ranks, n], in which each rank of the group has its row, with those
    of the others. Raises PeerLost.
    """
    matrix, here = _real(matrix), dist.get_rank(group)
    rows = _staged(transport, matrix)
    with lost(_NO_ANSWER):
        if transport.is_queued:
            works = [_all_gather(rows.view(-1), rows[here], group=group, async_op=True)]
        else:
            peers = _peers(group, here)
            received = [(rank, rows[at]) for at, rank in peers]
            works = begin_messages(group, [(rank, rows[here]) for _, rank in peers], received)
    return Exchange(matrix, rows, works)


def _staged(transport: Transport, matrix: Tensor) -> Tensor:
    """Returns it where messages are sent from."""
    return matrix if matrix.device == transport.staged else transport.to_send(matrix)


def _peers(group: dist.ProcessGroup, here: int) -> list[tuple[int, int]]:
    """Returns the place in the group, and the rank, of each of the others."""
    ranks = dist.get_process_group_ranks(group)
    return [(place, rank) for place, rank in enumerate(ranks) if place != here]


def _real(matrix: Tensor) -> Tensor:
    """Returns complex numbers as pairs, which all backends can add up."""
    return torch.view_as_real(matrix).flatten(1) if matrix.is_complex() else matrix
