"""Device types: counting the components of each type, and the worst device of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod
from operator import mul
from typing import NamedTuple

from pipedream.graph.cluster import Cluster


class WorstDevice(NamedTuple):
    """What a stage can count on: the speed of its slowest device, relative to the device that was
    profiled, and the bytes of its smallest.
    """

    speed: float
    memory: float


@dataclass(frozen=True)
class DeviceTypes:
    """The components of the outermost level, grouped by type.

    `machines[k]` are the components of type k, and `worst[k]` describes their devices. Components
    of one type are interchangeable, so a stage is described by how many it takes of each type.
    """

    machines: tuple[tuple[int, ...], ...]
    worst: tuple[WorstDevice, ...]

    @staticmethod
    def of(cluster: Cluster, memory: float | None = None, room: float = 0.0) -> DeviceTypes:
        """The types of `cluster`, with at most `memory` bytes used of each device, of which `room`
        are for others than the model.
        """
        devices = []
        for machine in range(cluster.machines[-1]):
            kind = cluster.kind(machine)
            limit = min(inf if limit is None else limit for limit in (kind.memory, memory))
            devices.append(WorstDevice(kind.speed, max(0.0, limit - room)))
        return DeviceTypes.from_devices(devices)

    @staticmethod
    def from_devices(devices: Iterable[WorstDevice]) -> DeviceTypes:
        """Groups components 0, 1, ..., whose devices are these."""
        machines: dict[WorstDevice, list[int]] = {}
        for machine, device in enumerate(devices):
            machines.setdefault(device, []).append(machine)
        return DeviceTypes(tuple(map(tuple, machines.values())), tuple(machines))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of components of each type."""
        return tuple(map(len, self.machines))

    def worst_of(self, taken: Sequence[int]) -> WorstDevice:
        """The worst device of a stage on `taken[k]` components of each type k.

        Minibatches are dealt out evenly, so the slowest device sets the pace.
        """
        devices = [device for count, device in zip(taken, self.worst, strict=True) if count]
        return WorstDevice(min(d.speed for d in devices), min(d.memory for d in devices))

    def worst_of_machines(self, machines: Iterable[int]) -> WorstDevice:
        """The worst device of a stage on these components."""
        taken = set(machines)
        return self.worst_of([len(taken.intersection(same)) for same in self.machines])

    def worst_of_ranks(self, ranks: Iterable[int], cluster: Cluster) -> WorstDevice:
        """The worst device of a stage on these ranks of the cluster."""
        return self.worst_of_machines(map(cluster.machine, ranks))

    @property
    def memory_limited(self) -> bool:
        """Whether any device has a memory limit."""
        return any(device.memory < inf for device in self.worst)

    @property
    def without_memory_limit(self) -> DeviceTypes:
        """The same devices with unlimited memory."""
        worst = (self.worst_of_machines([machine]) for machine in range(sum(self.counts)))
        return DeviceTypes.from_devices(WorstDevice(device.speed, inf) for device in worst)

    @property
    def smallest_memory(self) -> float:
        """Bytes of the smallest device."""
        return min(device.memory for device in self.worst)

    @property
    def fastest(self) -> float:
        """Relative speed of the fastest device."""
        return max(device.speed for device in self.worst)

    @property
    def distinct(self) -> tuple[WorstDevice, ...]:
        """The worst devices of all possible stages."""
        subsets = product((0, 1), repeat=len(self.worst))
        return tuple(sorted({self.worst_of(taken) for taken in subsets if any(taken)}))


class MixedRadixCounter:
    """Encodes the number of components taken of each type as one integer, digit by digit.

    With one type the code is the count. The code of a sum is the sum of the codes.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.size = prod(n + 1 for n in counts)
        self._weights = tuple(prod(n + 1 for n in counts[k + 1 :]) for k in range(len(counts)))

    def encode(self, taken: Sequence[int]) -> int:
        return sum(map(mul, taken, self._weights))

    def decode(self, code: int) -> tuple[int, ...]:
        """The number of components of each type."""
        digits = zip(self.counts, self._weights, strict=True)
        return tuple(code // weight % (most + 1) for most, weight in digits)

    def total(self, code: int) -> int:
        """The number of components of all types together."""
        return sum(self.decode(code))

    def choices(self) -> Iterator[tuple[int, ...]]:
        """Every choice of at least one component, as the number of each type."""
        choices = product(*(range(n + 1) for n in self.counts))
        next(choices)  # of no component
        return choices

    def remaining_after(self, taken: Sequence[int]) -> Sequence[int]:
        """The codes of all subsets of the components that are not `taken`, the largest last."""
        left = [n - t for n, t in zip(self.counts, taken, strict=True)]
        if len(left) == 1:
            return range(left[0] + 1)
        return [self.encode(subset) for subset in product(*(range(n + 1) for n in left))]
