"""The communicators of a run: groups of ranks with a queue of operations of their own.

NCCL connects two ranks when a communicator first moves something between them, and blocks the host
of each until the other has come to the same operation. In a pipeline that is never: rank 0 posts
the receive of a gradient first, rank 1 that of an activation. So each communicator is used when it
is made, by all its ranks and between all of them that will ever use it, one after the other in the
same order on all ranks; with nothing else under way, none waits for what another has not begun.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipedream.comm.exchange import ExchangeGroup
from pipedream.comm.messages import TeamLinks, begin_messages, lost
from pipedream.graph.errors import UserError
from pipedream.schedule.channel import Communicator, Ranks, TeamLink, Use, among

MOST_COMMUNICATORS = 31
"""Of a rank, its world included: torch has 32 streams for them, and one that shares its stream
waits for the other's receives. One is left for copies."""

_CTAS_OF_LINKS = 4


@dataclass(frozen=True)
class Communicators:
    """Those of one rank."""

    groups: Mapping[Communicator, dist.ProcessGroup]
    exchanges: Mapping[Ranks, ExchangeGroup]

    @staticmethod
    def connect(
        wanted: Iterable[Communicator], device: torch.device, backend: str, timeout: float
    ) -> Communicators:
        """Makes what this rank wants: called by all ranks of the run at the same time, each with
        its own. `timeout`: seconds after which an operation has failed.

        Raises PeerLost if a rank is gone, and UserError where a rank would have too many.
        """
        here = dist.get_rank()
        known = _check(wanted, here, backend)
        groups = dict[Communicator, dist.ProcessGroup]()
        exchanges = dict[Ranks, ExchangeGroup]()
        for each in _of_all_ranks(known):
            group = _make(each, backend, timeout)
            if here in each.members:
                groups[each] = group
                _use(each, group, device, backend)
                if each.use is Use.EXCHANGE:
                    exchanges[each.ranks] = ExchangeGroup(group)
        return Communicators(groups, exchanges)

    def sums(self, ranks: Collection[int], use: Use = Use.SUMS) -> dist.ProcessGroup | None:
        """Returns what adds up over these ranks; None for one, which needs nothing."""
        return self.groups[among(ranks, use)] if len(ranks) > 1 else None

    def exchange(self, ranks: Collection[int]) -> ExchangeGroup | None:
        """Returns what exchanges tensors among these ranks; None for one."""
        return self.exchanges[among(ranks, Use.EXCHANGE).ranks] if len(ranks) > 1 else None

    @property
    def links(self) -> TeamLinks:
        """Returns those of messages."""
        return {
            (each.ranks, each.receivers, each.use is Use.GRADIENT_MESSAGES): group
            for each, group in self.groups.items()
            if each.receivers
        }


def for_messages(team_links: Iterable[TeamLink], backend: str) -> list[Communicator]:
    """Returns those for messages on these links of a rank. gloo needs none: its messages have tags,
    and nothing waits for another.
    """
    return [Communicator.of_link(link) for link in team_links] if backend == "nccl" else []


def _check(wanted: Iterable[Communicator], here: int, backend: str) -> list[Communicator]:
    known = sorted({each for each in wanted if here in each.members})
    if backend == "nccl" and len(known) >= MOST_COMMUNICATORS:
        raise UserError(
            f"rank {here} would have {len(known) + 1} communicators, and torch has streams for"
            f" {MOST_COMMUNICATORS}, so that one would wait for another: give its stage fewer"
            " neighbours (links that skip stages, replicas) or mesh axes"
        )
    return known


def _of_all_ranks(known: Collection[Communicator]) -> list[Communicator]:
    """Returns those that any rank wants, in the order in which all of them make them."""
    every: list[Any] = [None] * dist.get_world_size()
    with lost("the ranks did not all come to connect"):
        dist.all_gather_object(every, list(known))
    wanted = sorted({each for of_rank in every for each in of_rank})
    for each in wanted:
        missing = [rank for rank in each.members if each not in every[rank]]
        assert not missing, f"ranks {missing} do not know of {each}"
    return wanted


def _make(each: Communicator, backend: str, timeout: float) -> dist.ProcessGroup:
    """Makes a group; all ranks of the run call it in the same order."""
    limit, options = timedelta(seconds=timeout), _options(each, backend)
    with lost(f"the ranks {each.members} could not be connected"):
        group: dist.ProcessGroup = dist.new_group(each.members, limit, pg_options=options)
    return group


def _options(each: Communicator, backend: str) -> Any:
    """Returns those of a group with NCCL. What carries messages goes ahead of passes, and waits for
    other ranks on few multiprocessors, which else it would keep from them.
    """
    if backend != "nccl" or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options()
    if each.receivers:
        options.is_high_priority_stream = True
        options.config.max_ctas = _CTAS_OF_LINKS
    return options


def _use(each: Communicator, group: dist.ProcessGroup, device: torch.device, backend: str) -> None:
    """Connects its ranks as they will be used, and waits until that is done."""
    if backend != "nccl":  # gloo connects when a group is made
        return
    here = dist.get_rank()
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    outgoing = [(other, byte) for one, other in each.pairs if one == here]
    incoming = [(one, torch.empty_like(byte)) for one, other in each.pairs if other == here]
    with lost(f"the ranks {each.members} could not be connected"):
        if not each.receivers:
            dist.all_reduce(byte, group=group)
        for work in begin_messages(group, outgoing, incoming):
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
