"""How the values of messages go to another worker, and come from it, device by device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipedream.comm.redistribute import extract, paste
from pipedream.comm.teams import TeamGroups
from pipedream.comm.transport import Message, Transport
from pipedream.graph.plan import RankAssignment
from pipedream.runtime.engine.device_messages import DeviceMessages
from pipedream.runtime.stages.crossings import Crossings
from pipedream.schedule.action import Action, Kind, Worker
from pipedream.schedule.channel import Channel


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
        for other in messages.parts:
            self.transport.post(self._channel(action, other), messages.types(other))

    def send(self, action: Action, crossings: Crossings, values: Sequence[Tensor]) -> None:
        """`values`: as this device holds them. Raises PeerLost, and UserError if they are not what
        the other worker waits for.
        """
        messages = self._messages(action, crossings)
        messages.check(action, values)
        for other, parts in messages.parts.items():
            pieces = [
                extract(values[part.number], messages.held[part.number], part.region)
                for part in parts
            ]
            self.transport.send(self._channel(action, other), pieces)

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
            torch.empty(held.shape, dtype=crossing.value.dtype, device=self.transport.device)
            for crossing, held in zip(messages.crossings, messages.held, strict=True)
        ]
        for channel, parts, tensors in arrived:
            for (number, region), tensor in zip(parts, tensors, strict=True):
                paste(values[number], messages.held[number], [(region, tensor)])
            self.transport.recycle(channel, tensors)
        for value, held, gathers in zip(values, messages.held, messages.gathers, strict=True):
            if gathers:
                assert self.team is not None
                self.team.gather(value, held, gathers)
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
        """To or from this device of the other worker."""
        key = action.kind, action.peer, other
        if key not in self.channels:
            self.channels[key] = Channel.of(action, self.assignment, self.device, other)
        return self.channels[key]
