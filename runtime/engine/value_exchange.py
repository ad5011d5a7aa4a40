"""What each device of a worker sends to the devices of another, or receives from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pipedream.comm.messages import Message
from pipedream.comm.redistribute import extract, paste
from pipedream.comm.teams import TeamGroups
from pipedream.comm.transport import TensorType, Transport
from pipedream.graph.errors import UserError
from pipedream.graph.placements.regions import Region, held_region
from pipedream.graph.plan import RankAssignment
from pipedream.runtime.stages.crossings import Crossing, Crossings
from pipedream.schedule.action import RECEIVES, Action, Kind, Worker
from pipedream.schedule.channel import Channel
from pipedream.sharding.tiles import TileTransfers, Transfer


class MessagePart(NamedTuple):
    """A region of the value with this number in a message."""

    number: int
    region: Region


@dataclass(frozen=True)
class DeviceMessages:
    """The messages of one device for an action.

    `crossings`: the values of the message; `regions`: what the device has of each. `parts`: by
    device of the other worker, alike at both ends. `gathers`: of each value that is received, what
    the devices of this worker then send each other.
    """

    crossings: tuple[Crossing, ...]
    regions: tuple[Region, ...]
    parts: Mapping[int, tuple[MessagePart, ...]]
    gathers: tuple[tuple[Transfer, ...], ...]

    @staticmethod
    def of(
        action: Action, crossings: Crossings, device: int, devices: int, others: int
    ) -> DeviceMessages:
        """Of the `device` of this worker, which has so many `devices`; the other has `others`."""
        assert action.peer is not None
        receives = action.kind in RECEIVES
        back = action.kind in (Kind.RECV_GRADIENT, Kind.SEND_GRADIENT)
        at_target = receives is not back
        every = (crossings.receives if at_target else crossings.sends)[action.peer[0]]
        own = tuple(each for each in every if each.value.requires_grad or not back)
        sides = [each.target if at_target else each.source for each in own]
        regions = tuple(
            held_region(each.value.shape, side.mesh, side.placements, device)
            for each, side in zip(own, sides, strict=True)
        )
        transfers = [each.back if back else each.there for each in own]
        if any(each.sends for each in transfers):
            parts = _parts(transfers, receives, device)
        elif receives:  # nothing is sent, and each device waits until it might be
            parts = {device % others: ()}
        else:
            parts = dict.fromkeys(range(device, others, devices), ())
        return DeviceMessages(
            own, regions, parts, tuple(each.gathers if receives else () for each in transfers)
        )

    @property
    def is_direct(self) -> bool:
        """Whether all that the device holds comes from one other device."""
        whole = tuple(MessagePart(number, region) for number, region in enumerate(self.regions))
        return list(self.parts.values()) == [whole] and not any(self.gathers)

    def check(self, action: Action, values: Sequence[Tensor]) -> None:
        """Raises UserError unless these are of the types and shapes that both sides know. The other
        one would take what fits, and leave the rest of its memory as it was.
        """
        for crossing, region, value in zip(self.crossings, self.regions, values, strict=True):
            if value.dtype != crossing.value.dtype or value.shape != region.shape:
                known = TensorType(region.shape, crossing.value.dtype)
                raise _not_as_agreed(action, crossing.value.name, value, known)

    def types(self, other: int) -> list[TensorType]:
        """Returns those of the tensors that the other device sends."""
        return [
            TensorType(part.region.shape, self.crossings[part.number].value.dtype)
            for part in self.parts[other]
        ]


def _parts(
    transfers: Sequence[TileTransfers], receives: bool, device: int
) -> dict[int, tuple[MessagePart, ...]]:
    parts: dict[int, list[MessagePart]] = {}
    for number, of_value in enumerate(transfers):
        for each in of_value.sends:
            here, there = (each.target, each.source) if receives else (each.source, each.target)
            if here == device:
                parts.setdefault(there, []).append(MessagePart(number, each.region))
    return {there: tuple(parts[there]) for there in sorted(parts)}


def _not_as_agreed(action: Action, name: str, value: Tensor, agreed: TensorType) -> UserError:
    assert action.peer is not None
    shown = [f"{list(each.shape)} of {str(each.dtype)[6:]}" for each in (value, agreed)]
    what = "the gradient of " * (action.kind is Kind.SEND_GRADIENT) + name
    return UserError(
        f"stage {action.stage}: {what}, in minibatch {action.minibatch}, is {shown[0]} where stage"
        f" {action.peer[0]} waits for {shown[1]}, as the model was captured: leave its weights as"
        " they were made, and give operators of your own a fake implementation of what they return"
    )


@dataclass
class ValueExchange:
    """The messages of one `device` of a worker. `team`: the groups of its mesh, if it has one."""

    transport: Transport
    assignment: RankAssignment
    device: int = 0
    team: TeamGroups | None = None
    messages: dict[tuple[Kind, Worker | None, Crossings], DeviceMessages] = field(
        default_factory=dict
    )
    channels: dict[tuple[Kind, Worker | None, int], Channel] = field(default_factory=dict)

    def post(self, action: Action, crossings: Crossings) -> None:
        """Posts a receive that is still to come. Raises PeerLost."""
        messages = self._messages(action, crossings)
        self.transport.post(
            {self._channel(action, other): messages.types(other) for other in messages.parts}
        )

    def send(self, action: Action, crossings: Crossings, values: Sequence[Tensor]) -> None:
        """`values`: as this device holds them. Raises PeerLost, and UserError if they are not what
        the other worker waits for.
        """
        messages = self._messages(action, crossings)
        messages.check(action, values)
        self.transport.send(
            {
                self._channel(action, other): [
                    extract(values[part.number], messages.regions[part.number], part.region)
                    for part in parts
                ]
                for other, parts in messages.parts.items()
            }
        )

    def receive(
        self, action: Action, crossings: Crossings
    ) -> tuple[Sequence[Tensor], list[tuple[Channel, Message]]]:
        """Returns the values as this device is to hold them, and the messages whose memory they
        are in. Raises PeerLost.
        """
        messages = self._messages(action, crossings)
        arrived = [
            (channel, parts, self.transport.receive(channel))
            for other, parts in messages.parts.items()
            for channel in [self._channel(action, other)]
        ]
        if messages.is_direct:
            ((channel, _, tensors),) = arrived
            return tensors, [(channel, tensors)]
        values = [
            torch.empty(region.shape, dtype=crossing.value.dtype, device=self.transport.device)
            for crossing, region in zip(messages.crossings, messages.regions, strict=True)
        ]
        for channel, parts, tensors in arrived:
            for (number, sent), tensor in zip(parts, tensors, strict=True):
                paste(values[number], messages.regions[number], [(sent, tensor)])
            self.transport.recycle(channel, tensors)
        for value, region, gathers in zip(values, messages.regions, messages.gathers, strict=True):
            if gathers:
                assert self.team is not None
                self.team.gather(value, region, gathers)
        return values, []

    def _messages(self, action: Action, crossings: Crossings) -> DeviceMessages:
        key = action.kind, action.peer, crossings
        if key not in self.messages:
            assert action.peer is not None
            counts = [
                len(self.assignment[stage][replica].ranks)
                for stage, replica in ((action.stage, action.replica), action.peer)
            ]
            self.messages[key] = DeviceMessages.of(action, crossings, self.device, *counts)
        return self.messages[key]

    def _channel(self, action: Action, other: int) -> Channel:
        """Returns that to or from this device of the other worker."""
        key = action.kind, action.peer, other
        if key not in self.channels:
            self.channels[key] = Channel.of(action, self.assignment, self.device, other)
        return self.channels[key]
