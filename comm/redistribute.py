"""Redistribution of tensors among the ranks of a mesh.

Executes what `sharding` has planned. All that is gathered, scattered or exchanged within an
axis goes from rank to rank (`ExchangeGroup`): parts may be of any sizes, empty ones too, and none
is copied together with others first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch import Tensor

from pipedream.comm.exchange import ExchangeGroup
from pipedream.graph.placements.placement import Mesh, axis_groups
from pipedream.graph.placements.regions import Region, blocks, held_region, intersection
from pipedream.sharding.steps import Collective, Step
from pipedream.sharding.tiles import Transfer


@dataclass(frozen=True)
class _AxisGroup:
    """The devices that this rank exchanges with on one axis, in the order of the group's ranks."""

    devices: tuple[int, ...]
    group: ExchangeGroup


@dataclass(frozen=True)
class _Moved:
    """What one device of an axis holds before and after a step, and, of each device of the axis,
    what it sends there and what comes from there. Found once: between operators of a few
    milliseconds it took a quarter of one each time.
    """

    before: Region
    after: Region
    outgoing: tuple[Region, ...]
    incoming: tuple[Region, ...]
    incoming_shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    @lru_cache(maxsize=10_000)
    def of(
        shape: tuple[int, ...], mesh: Mesh, step: Step, devices: tuple[int, ...], here: int
    ) -> _Moved:
        before = [held_region(shape, mesh, step.source, each) for each in devices]
        after = [held_region(shape, mesh, step.target, each) for each in devices]
        incoming = tuple(intersection(old, after[here]) for old in before)
        return _Moved(
            before[here],
            after[here],
            tuple(intersection(before[here], new) for new in after),
            incoming,
            tuple(region.shape for region in incoming),
        )


class MeshGroups:
    """The groups of a mesh: one for each axis, of the ranks along it that this rank is among.

    `ranks[device]` is the rank of each device; `device` is that of this rank.
    """

    def __init__(
        self,
        mesh: Mesh,
        ranks: Sequence[int],
        device: int,
        group_of: Callable[[Sequence[int]], ExchangeGroup | None],
    ) -> None:
        self.mesh, self.ranks, self.device = mesh, tuple(ranks), device
        self.axes: dict[int, _AxisGroup] = {}
        for axis, devices in along_axes(mesh, device):
            group = group_of([ranks[each] for each in devices])
            assert group is not None
            by_rank = tuple(sorted(devices, key=self.ranks.__getitem__))
            self.axes[axis] = _AxisGroup(by_rank, group)

    def redistribute(self, local: Tensor, shape: tuple[int, ...], steps: Sequence[Step]) -> Tensor:
        """Returns what this rank holds after the steps, if it holds `local` of a tensor of this
        shape.

        `local` is left as it is, and may be the result. Called by all ranks of the mesh, with the
        same steps. Raises PeerLost.
        """
        for step in steps:
            if step.axis in self.axes:  # nothing changes on an axis of one device
                local = self._run(local, shape, step)
        return local

    def _run(self, local: Tensor, shape: tuple[int, ...], step: Step) -> Tensor:
        axis = self.axes[step.axis]
        here = axis.devices.index(self.device)
        moved = _Moved.of(shape, self.mesh, step, axis.devices, here)
        before, after = moved.before, moved.after
        assert tuple(local.shape) == before.shape, f"{tuple(local.shape)} before {step}"
        match step.collective:
            case Collective.SLICE:
                return extract(local, before, after)
            case Collective.KEEP_ONE:
                return local if self.device == min(axis.devices) else torch.zeros_like(local)
            case Collective.ZERO_PAD:
                return paste(local.new_zeros(after.shape), after, [(before, local)])
            case Collective.ALL_REDUCE:
                return axis.group.add_up(local)
        outgoing = [_seen(local, before, part) for part in moved.outgoing]
        parts = axis.group.exchange(outgoing, moved.incoming_shapes)
        if step.collective is Collective.REDUCE_SCATTER:
            return reduce(torch.add, parts)
        result = local.new_empty(after.shape)
        return paste(result, after, zip(moved.incoming, parts, strict=True))


def along_axes(mesh: Mesh, device: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Yields each axis of several devices, and those on it that this one is among."""
    for axis, size in enumerate(mesh):
        if size > 1:
            yield axis, next(group for group in axis_groups(mesh, axis) if device in group)


def gather_tiles(
    local: Tensor,
    region: Region,
    gathers: Sequence[Transfer],
    device: int,
    ranks: Sequence[int],
    group: ExchangeGroup,
) -> None:
    """Completes what a device holds of a value, of which it was sent a part, from what the others
    of its mesh were sent. Called by all of them: `ranks[d]` is that of device d, in the `group` of
    these ranks. Raises PeerLost.
    """
    outgoing = {sent.target: sent.region for sent in gathers if sent.source == device}
    incoming = {sent.source: sent.region for sent in gathers if sent.target == device}
    by_rank = sorted(range(len(ranks)), key=ranks.__getitem__)
    pieces = [
        extract(local, region, outgoing[peer]) if peer in outgoing else local.new_empty(0)
        for peer in by_rank
    ]
    shapes = [incoming[peer].shape if peer in incoming else (0,) for peer in by_rank]
    parts = zip(by_rank, group.exchange(pieces, shapes), strict=True)
    paste(local, region, ((incoming[peer], part) for peer, part in parts if peer in incoming))


def _seen(local: Tensor, region: Region, part: Region) -> Tensor:
    """Returns the same as `extract`, not copied where it is one box: for what is read at once."""
    boxes = blocks(part, region)
    return local[boxes[0][0]] if len(boxes) == 1 else extract(local, region, part)


def extract(local: Tensor, region: Region, part: Region) -> Tensor:
    """Returns the local tensor of `part` out of that of `region`, which has all of it."""
    if part == region:
        return local
    piece = local.new_empty(part.shape)
    for here, there in blocks(part, region):
        piece[there] = local[here]
    return piece


def paste(local: Tensor, region: Region, parts: Iterable[tuple[Region, Tensor]]) -> Tensor:
    """Writes the local tensors of `parts` into that of `region`."""
    for part, piece in parts:
        for here, there in blocks(part, region):
            local[here] = piece[there]
    return local
