"""What one device of a worker sends to each device of another, or receives from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pipedream.comm.transport import TensorType
from pipedream.graph.errors import UserError
from pipedream.graph.placements.regions import Region, held_region
from pipedream.runtime.stages.crossings import Crossing, Crossings
from pipedream.schedule.action import RECEIVES, Action, Kind
from pipedream.sharding.tiles import TileTransfers, Transfer


class Part(NamedTuple):
    """A region of the value with this number in a message."""

    number: int
    region: Region


@dataclass(frozen=True)
class DeviceMessages:
    """Those of one device for an action.

    `crossings`: the values of the message; `held`: what the device has of each. `parts`: by device
    of the other worker, alike at both ends. `gathers`: of each value that is received, what the
    devices of this worker then send each other.
    """

    crossings: tuple[Crossing, ...]
    held: tuple[Region, ...]
    parts: Mapping[int, tuple[Part, ...]]
    gathers: tuple[tuple[Transfer, ...], ...]

    @staticmethod
    def of(
        action: Action, crossings: Crossings, device: int, devices: int, others: int
    ) -> DeviceMessages:
        """`device`: of this worker, which has so many `devices`; `others`: those of the other."""
        assert action.peer is not None
        receives = action.kind in RECEIVES
        back = action.kind in (Kind.RECV_GRADIENT, Kind.SEND_GRADIENT)
        at_target = receives is not back
        every = (crossings.receives if at_target else crossings.sends)[action.peer[0]]
        own = tuple(each for each in every if each.value.requires_grad or not back)
        sides = [each.target if at_target else each.source for each in own]
        held = tuple(
            held_region(each.value.shape, side.mesh, side.placements, device)
            for each, side in zip(own, sides, strict=True)
        )
        ways = [each.back if back else each.there for each in own]
        if any(way.sends for way in ways):
            parts = _parts(ways, receives, device)
        elif receives:  # nothing is sent, and each device waits until it might be
            parts = {device % others: ()}
        else:
            parts = dict.fromkeys(range(device, others, devices), ())
        return DeviceMessages(
            own, held, parts, tuple(way.gathers if receives else () for way in ways)
        )

    @property
    def is_direct(self) -> bool:
        """Whether all that the device holds comes from one other device."""
        whole = tuple(Part(number, region) for number, region in enumerate(self.held))
        return list(self.parts.values()) == [whole] and not any(self.gathers)

    def check(self, action: Action, values: Sequence[Tensor]) -> None:
        """Raises UserError unless these are of the types and shapes that both sides know. The other
        one would take what fits, and leave the rest of its memory as it was.
        """
        for crossing, held, value in zip(self.crossings, self.held, values, strict=True):
            if value.dtype != crossing.value.dtype or value.shape != held.shape:
                known = TensorType(held.shape, crossing.value.dtype)
                raise _not_as_agreed(action, crossing.value.name, value, known)

    def types(self, other: int) -> list[TensorType]:
        """Of the tensors that the other device sends."""
        return [
            TensorType(part.region.shape, self.crossings[part.number].value.dtype)
            for part in self.parts[other]
        ]


def _parts(
    ways: Sequence[TileTransfers], receives: bool, device: int
) -> dict[int, tuple[Part, ...]]:
    parts: dict[int, list[Part]] = {}
    for number, way in enumerate(ways):
        for each in way.sends:
            here, there = (each.target, each.source) if receives else (each.source, each.target)
            if here == device:
                parts.setdefault(there, []).append(Part(number, each.region))
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
