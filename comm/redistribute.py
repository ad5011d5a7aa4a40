"""Redistribution of tensors among the ranks of a mesh, and transfers from one mesh to another.

Executes what `graph/sharding` has planned. All that is gathered, scattered or exchanged within an
axis goes from rank to rank in one batch of messages, with gloo and with NCCL: parts may be of any
sizes, empty ones too, none is copied together with others first, and a sum is added up in the same
order everywhere. With gloo sums are made so, too: its own all-reduce takes longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from pipedream.comm.transport import PeerLost, connect_group
from pipedream.graph.sharding.placement import Mesh, Placements, axis_groups
from pipedream.graph.sharding.regions import Region, blocks, held_region, intersection
from pipedream.graph.sharding.steps import Collective, Step
from pipedream.graph.sharding.tiles import TileTransfers, Transfer


@dataclass(frozen=True)
class _AxisGroup:
    """The devices that this rank exchanges with on one axis, in the order of the group's ranks."""

    devices: tuple[int, ...]
    group: dist.ProcessGroup


class MeshGroups:
    """The process groups of a mesh: one for each axis that this rank is on.

    `ranks[device]` is the rank of each device. Made by all ranks of the run at the same time, with
    the same arguments, those outside the mesh included; they have `device` None. Raises PeerLost.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int]) -> None:
        here = dist.get_rank()
        self.mesh, self.ranks = mesh, tuple(ranks)
        self.device = self.ranks.index(here) if here in self.ranks else None
        self.axes: dict[int, _AxisGroup] = {}
        for axis, size in enumerate(mesh):
            for devices in axis_groups(mesh, axis) if size > 1 else ():
                group = connect_group(ranks[device] for device in devices)
                if self.device in devices:
                    by_rank = tuple(sorted(devices, key=self.ranks.__getitem__))
                    self.axes[axis] = _AxisGroup(by_rank, group)

    def redistribute(self, local: Tensor, shape: tuple[int, ...], steps: Sequence[Step]) -> Tensor:
        """What this rank holds after the steps, if it holds `local` of a tensor of this shape.

        `local` is left as it is, and may be the result. Called by all ranks of the mesh, with the
        same steps. Raises PeerLost.
        """
        for step in steps:
            if step.axis in self.axes:  # nothing changes on an axis of one device
                local = self._run(local, shape, step)
        return local

    def _run(self, local: Tensor, shape: tuple[int, ...], step: Step) -> Tensor:
        assert self.device is not None, "this rank is not on the mesh"
        axis = self.axes[step.axis]
        before = [held_region(shape, self.mesh, step.source, each) for each in axis.devices]
        after = [held_region(shape, self.mesh, step.target, each) for each in axis.devices]
        here = axis.devices.index(self.device)
        assert tuple(local.shape) == before[here].shape, f"{tuple(local.shape)} before {step}"
        match step.collective:
            case Collective.SLICE:
                return cut(local, before[here], after[here])
            case Collective.KEEP_ONE:
                return local if self.device == min(axis.devices) else torch.zeros_like(local)
            case Collective.ZERO_PAD:
                zeros = local.new_zeros(after[here].shape)
                return paste(zeros, after[here], [(before[here], local)])
            case Collective.ALL_REDUCE:
                return _summed(local, axis.group, here)
        outgoing = [cut(local, before[here], intersection(before[here], new)) for new in after]
        incoming = [intersection(old, after[here]) for old in before]
        parts = _exchange(outgoing, [region.shape for region in incoming], axis.group, here)
        if step.collective is Collective.REDUCE_SCATTER:
            return reduce(torch.add, parts)
        result = local.new_empty(after[here].shape)
        return paste(result, after[here], zip(incoming, parts, strict=True))


@dataclass(frozen=True)
class PlacedOnRanks:
    """How the ranks of a stage hold a tensor: `ranks[device]` is the rank of each device."""

    mesh: Mesh
    placements: Placements
    ranks: tuple[int, ...]

    def region(self, shape: tuple[int, ...]) -> Region:
        """What this rank holds."""
        device = self.ranks.index(dist.get_rank())
        return held_region(shape, self.mesh, self.placements, device)


@dataclass(frozen=True)
class WholeTensor:
    """What the target ranks have to know of a tensor that they are sent. `shape`: of all of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def send_tiles(
    local: Tensor | None,
    tensor: WholeTensor,
    transfers: TileTransfers,
    source: PlacedOnRanks,
    target: PlacedOnRanks,
    tag: int = 0,
) -> Tensor | None:
    """Sends a tensor from the source ranks to the target ranks; returns what a target rank holds.

    Called by all ranks of both sides: on source ranks with what they hold, on others with None.
    Returns None on ranks that are no targets. A rank may be on both sides. `tag`: with gloo, one
    that no other messages between these ranks have meanwhile. Raises PeerLost.
    """
    assert local is None or local.dtype == tensor.dtype, f"{local.dtype}, not {tensor.dtype}"
    sent = _deliver(local, tensor, transfers.sends, source, target, tag)
    if dist.get_rank() not in target.ranks:
        return None
    region = target.region(tensor.shape)
    result = torch.empty(region.shape, dtype=tensor.dtype, device=tensor.device)
    paste(result, region, sent)
    return paste(result, region, _deliver(result, tensor, transfers.gathers, target, target, tag))


def gather_tiles(
    local: Tensor,
    held: Region,
    gathers: Sequence[Transfer],
    device: int,
    ranks: Sequence[int],
    group: dist.ProcessGroup,
) -> None:
    """Completes what a device holds of a value, of which it was sent a part, from what the others
    of its mesh were sent. Called by all of them: `ranks[d]` is that of device d, in the `group` of
    these ranks. Raises PeerLost.
    """
    outgoing = {each.target: each.region for each in gathers if each.source == device}
    incoming = {each.source: each.region for each in gathers if each.target == device}
    by_rank = sorted(range(len(ranks)), key=ranks.__getitem__)
    pieces = [
        cut(local, held, outgoing[each]) if each in outgoing else local.new_empty(0)
        for each in by_rank
    ]
    shapes = [incoming[each].shape if each in incoming else (0,) for each in by_rank]
    parts = zip(by_rank, _exchange(pieces, shapes, group, by_rank.index(device)), strict=True)
    paste(local, held, ((incoming[each], part) for each, part in parts if each in incoming))


def cut(local: Tensor, region: Region, part: Region) -> Tensor:
    """The local tensor of `part` out of that of `region`, which has all of it."""
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


def _exchange(
    outgoing: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    group: dist.ProcessGroup,
    here: int,
) -> list[Tensor]:
    """Sends one tensor to each rank of the group, in which this one is number `here`, and receives
    one of these shapes from each.
    """
    device = outgoing[0].device
    staged = _staged(device, group)
    parts = list(outgoing)  # that of this rank stays
    operations = []
    for number, (piece, shape) in enumerate(zip(outgoing, shapes, strict=True)):
        if number == here:
            continue
        if piece.numel():
            message = piece.to(staged).contiguous()
            operations.append(dist.P2POp(dist.isend, message, group=group, group_peer=number))
        parts[number] = torch.empty(shape, dtype=piece.dtype, device=staged)
        if parts[number].numel():
            received = parts[number]
            operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=number))
    with _peers():
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
    return [part.to(device) for part in parts]


def _summed(local: Tensor, group: dist.ProcessGroup, here: int) -> Tensor:
    """The sum over the group: of all devices if they are few, else of parts that are gathered."""
    if dist.get_backend(group) == "nccl":
        total = local.clone(memory_format=torch.contiguous_format)
        with _peers():
            dist.all_reduce(total, group=group)
        return total
    count = dist.get_world_size(group)
    if count == 2:
        return reduce(torch.add, _exchange([local] * 2, [tuple(local.shape)] * 2, group, here))
    pieces = list(torch.tensor_split(local.reshape(-1), count))
    own = [tuple(pieces[here].shape)] * count
    total = reduce(torch.add, _exchange(pieces, own, group, here))
    shapes = [tuple(piece.shape) for piece in pieces]
    return torch.cat(_exchange([total] * count, shapes, group, here)).view(local.shape)


def _deliver(
    local: Tensor | None,
    tensor: WholeTensor,
    transfers: Sequence[Transfer],
    source: PlacedOnRanks,
    target: PlacedOnRanks,
    tag: int,
) -> list[tuple[Region, Tensor]]:
    """Sends what this rank has to send; returns what it is sent."""
    here, staged = dist.get_rank(), _staged(tensor.device, None)
    operations, parts = [], []
    for each in transfers:
        sender, receiver = source.ranks[each.source], target.ranks[each.target]
        if sender == here:
            assert local is not None, f"rank {here} has to give what it holds"
            piece = cut(local, source.region(tensor.shape), each.region)
            if receiver != here:
                outgoing = piece.to(staged).contiguous()
                operations.append(dist.P2POp(dist.isend, outgoing, receiver, tag=tag))
        elif receiver == here:
            piece = torch.empty(each.region.shape, dtype=tensor.dtype, device=staged)
            operations.append(dist.P2POp(dist.irecv, piece, sender, tag=tag))
        if receiver == here:
            parts.append((each.region, piece))
    with _peers():
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
    return parts


def _staged(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors are while they are sent: gloo takes those of the host alone."""
    return device if dist.get_backend(group) == "nccl" else torch.device("cpu")


@contextmanager
def _peers() -> Iterator[None]:
    """Raises PeerLost where the backend reports an error."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost("another rank of the mesh does not answer") from error
