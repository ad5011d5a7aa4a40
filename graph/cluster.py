"""The cluster: levels of components, innermost first, their links and their types of device.

A cluster file is YAML, `pipedream-cluster/1`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from pipedream.graph.command import write_whole
from pipedream.graph.errors import ArtifactModel, read_artifact
from pipedream.graph.units import parse_bytes, parse_seconds, show_bytes, show_seconds


def _parsed_by(parse: Callable[[str], float]) -> BeforeValidator:
    """Turns text with a unit into a number."""
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


_Amount = Field(ge=0, allow_inf_nan=False, strict=True)
_Positive = Field(gt=0, allow_inf_nan=False, strict=True)

MOST_BUSY = 10.0
"""Times a message's own time; a percentage in place of a share is refused."""
_NO_LINK = "give either latency and bandwidth, or points of bytes and seconds"

Bytes = Annotated[float, _parsed_by(parse_bytes), _Amount]
SomeBytes = Annotated[float, _parsed_by(parse_bytes), _Positive]
Seconds = Annotated[float, _parsed_by(parse_seconds), _Amount]


class _ClusterPart(ArtifactModel):
    """Is written without the fields that have their default values."""

    @model_serializer(mode="wrap")
    def _short(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {
            name: value
            for name, value in write(self).items()
            if fields[name].is_required() or getattr(self, name) != fields[name].default
        }


class Link(_ClusterPart):
    """Says how long a message takes: latency plus bytes over bandwidth, or as measured."""

    latency: Seconds = 0.0
    """Seconds, with `bandwidth`."""
    bandwidth: SomeBytes | None = None
    """Bytes per second."""
    points: tuple[tuple[Bytes, Seconds], ...] = ()
    """In place of both: two or more pairs of (bytes, seconds); more bytes never take less time.
    Between points the time is interpolated. Fewer bytes than the first point take as long as it;
    more than the last continue at the rate of the last two.
    """
    busy: float = Field(default=0.0, ge=0, le=MOST_BUSY, strict=True)
    """Share of that time in which the ranks at both ends cannot compute. Above 1 where a message
    beside compute takes longer than alone, and nothing is computed for all of that time.
    """

    @model_validator(mode="before")
    @classmethod
    def _list_of_points(cls, data: Any) -> Any:
        if not isinstance(data, list | dict | Link):
            raise ValueError(_NO_LINK)
        return {"points": data} if isinstance(data, list) else data

    @model_validator(mode="after")
    def _check(self) -> Link:
        if (self.bandwidth is None) == (not self.points) or (self.points and self.latency):
            raise ValueError(_NO_LINK)
        if len(self.points) == 1:
            raise ValueError("one point is not enough: measure two sizes or more")
        for (fewer, sooner), (more, later) in zip(self.points, self.points[1:], strict=False):
            if fewer >= more:
                raise ValueError(f"{more:g} bytes come after {fewer:g}: list the smallest first")
            if sooner > later:
                raise ValueError(
                    f"{more:g} bytes take {later:g} s, fewer take {sooner:g} s: measure again,"
                    " or leave one of them out"
                )
        return self

    def seconds(self, size: ArrayLike) -> NDArray[np.float64]:
        """Returns the seconds of messages of `size` bytes, of the same shape; 0 for empty ones."""
        size = np.asarray(size, dtype=np.float64)
        if self.bandwidth is not None:
            taken = self.latency + size / self.bandwidth
        else:
            sizes, times = np.array(self.points).T
            rate = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            beyond = np.maximum(size - sizes[-1], 0.0) * rate
            taken = np.interp(size, sizes, times) + beyond
        return np.where(size > 0, taken, 0.0)

    def stretched(self, size: float, time: float) -> Link:
        """Returns the link that takes `time` times as long for messages `size` times as large."""
        if self.bandwidth is not None:
            return Link(
                latency=self.latency * time, bandwidth=self.bandwidth * size / time, busy=self.busy
            )
        points = tuple((b * size, s * time) for b, s in self.points)
        return Link(points=points, busy=self.busy)


class DeviceType(_ClusterPart):
    """A type of device."""

    name: str = Field(min_length=1)
    speed: float = Field(default=1.0, gt=0, allow_inf_nan=False, strict=True)
    """Relative to the device that the profile was measured on; 2 is twice as fast."""
    memory: SomeBytes | None = None
    """Bytes on each device; None if not known."""


class Cluster(_ClusterPart):
    """Levels of components. Each tuple has one entry for each level, innermost first.

    `machines=(4, 2), bandwidth=(1e10, 1e9)`: 4 devices in a machine at 10 GB/s, 2 machines at 1
    GB/s. Alpa calls this the 2 x 4 mesh.
    """

    machines: tuple[int, ...]
    """Number of components."""
    bandwidth: tuple[float, ...]
    """Bytes per second between components."""
    latency: tuple[Seconds, ...] = ()
    """Seconds; zero by default."""
    names: tuple[str, ...] = ()
    """Names of the levels, if they have any."""
    send: tuple[Link | None, ...] = ()
    """Messages as measured; None at a level where they were not."""
    all_reduce: tuple[Link | None, ...] = ()
    """All-reduces over all components of a level as measured; None where they were not."""
    all_gather: tuple[Link | None, ...] = ()
    """All-gathers likewise, among the devices of a mesh; a size is that of what all get."""
    kinds: tuple[DeviceType, ...] = ()
    """The kinds of devices. Without them every device is as the one that was profiled."""
    machine_kinds: tuple[str, ...] = ()
    """Name of the kind of each component of the outermost level."""

    @model_validator(mode="after")
    def _check(self) -> Cluster:
        if not self.machines:
            raise ValueError("a cluster has at least one level of machines")
        if len(self.machines) != len(self.bandwidth):
            raise ValueError(
                f"{len(self.machines)} levels of machines but {len(self.bandwidth)} bandwidths"
            )
        if any(count < 1 for count in self.machines):
            raise ValueError("every level has at least 1 machine")
        if not all(0 < speed < math.inf for speed in self.bandwidth):
            raise ValueError("every bandwidth is a positive number of bytes per second")
        if len(self.latency or self.machines) != len(self.machines):
            raise ValueError(
                f"{len(self.machines)} levels of machines but {len(self.latency)} latencies"
            )
        for field in ("names", "send", "all_reduce", "all_gather"):
            count = len(getattr(self, field))
            if count not in (0, len(self.machines)):
                raise ValueError(f"{len(self.machines)} levels of machines but {count} of {field}")
        for ring_links in (self.all_reduce, self.all_gather):
            if any(n < 2 and it for n, it in zip(self.machines, ring_links, strict=False)):
                raise ValueError("a collective was measured at a level of one component")
        check_kinds(self.kinds, self.machine_kinds, self.machines[-1])
        object.__setattr__(self, "latency", self.latency or (0.0,) * len(self.machines))
        return self

    @model_serializer(mode="wrap")
    def _without_latency(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = self._short(write)
        if not any(self.latency):
            del fields["latency"]
        return fields

    @property
    def devices(self) -> int:
        return math.prod(self.machines)

    @property
    def measured(self) -> bool:
        """Tells whether any link was measured."""
        return any((*self.send, *self.all_reduce, *self.all_gather))

    def link(self, level: int) -> Link:
        """Returns the link for a message between two components of a level (1 innermost)."""
        measured = self.send[level - 1] if self.send else None
        if measured is not None:
            return measured
        return Link(latency=self.latency[level - 1], bandwidth=self.bandwidth[level - 1])

    def ring_link(self, level: int) -> Link:
        """Returns the link for one step of a ring all-reduce at a level (1 innermost).

        A ring of n components takes 2(n-1) steps, each of an n-th of the bytes, which gives the
        step if the whole all-reduce was measured; else a step is a message like any other.
        """
        whole = self.all_reduce[level - 1] if self.all_reduce else None
        if whole is None:
            return self.link(level)
        count = self.machines[level - 1]
        return whole.stretched(1 / count, 1 / (2 * (count - 1)))

    def mesh_link(self, level: int, devices: int) -> Link:
        """Returns the link for one of the k - 1 steps of a ring of k `devices` of a mesh at a level
        (1 innermost).

        If an all-gather of all n components was measured, the steps together take as long as one
        in which each sends as many bytes: since all send to all at once, fewer of them wait no
        less. Else a step is that of an all-reduce.
        """
        whole = self.all_gather[level - 1] if self.all_gather else None
        if whole is None:
            return self.ring_link(level)
        count, steps = self.machines[level - 1], devices - 1
        return whole.stretched((count - 1) / count / steps, 1 / steps)

    def kind(self, machine: int) -> DeviceType:
        """Returns the type of the devices in a component of the outermost level."""
        if not self.kinds:
            return DeviceType(name="device")
        return next(kind for kind in self.kinds if kind.name == self.machine_kinds[machine])

    def machine(self, rank: int) -> int:
        """Returns the component of the outermost level that holds a rank."""
        return rank // math.prod(self.machines[:-1])

    def device(self, rank: int) -> DeviceType:
        """Returns the type of a rank's device."""
        return self.kind(self.machine(rank))

    def rank(self, place: tuple[int, ...]) -> int:
        """Returns the rank of a device, `place` giving its index at each level, innermost first.

        The innermost level counts fastest: on 4,2 place (1, 1) is rank 5.
        """
        assert len(place) == len(self.machines)
        rank = 0
        for index, count in zip(reversed(place), reversed(self.machines), strict=True):
            assert 0 <= index < count
            rank = rank * count + index
        return rank

    def level(self, one: int, other: int) -> int:
        """Returns the innermost level (1 innermost) of which one component holds both ranks'
        devices; the link between them is that level's.
        """
        level = 1
        for count in self.machines[:-1]:
            one, other = one // count, other // count
            if one == other:
                break
            level += 1
        return level

    def places(self) -> Iterator[tuple[int, ...]]:
        """Returns the place of every device, in the order of the ranks."""
        outermost_first = product(*(range(count) for count in reversed(self.machines)))
        return (tuple(reversed(place)) for place in outermost_first)


def ring_seconds(step: Link, size: ArrayLike, replicas: ArrayLike) -> NDArray[np.float64]:
    """Returns the seconds of ring all-reduces of 2(m-1) steps; the arrays broadcast."""
    steps = np.asarray(replicas, dtype=np.float64)
    return 2 * (steps - 1) * step.seconds(np.asarray(size, dtype=np.float64) / steps)


def check_kinds(kinds: tuple[DeviceType, ...], machine_kinds: tuple[str, ...], count: int) -> None:
    """Raises ValueError unless each of `count` machines is of a kind, or there are no kinds."""
    known = [kind.name for kind in kinds]
    for name in known:
        if known.count(name) > 1:
            raise ValueError(f"two kinds are called {name}")
    for name in machine_kinds:
        if name not in known:
            raise ValueError(f"there is no kind {name} among {', '.join(known) or 'none'}")
    if known and len(machine_kinds) != count:
        raise ValueError(
            f"give the kind of each of the {count} machines of the outermost level,"
            f" not of {len(machine_kinds)}"
        )


class _LevelEntry(ArtifactModel):
    """One level of the cluster: equal components, and the links between any two of them."""

    name: str = Field(min_length=1)
    count: int = Field(ge=1, strict=True)
    """Number of components."""
    bandwidth: SomeBytes
    """Bytes per second between two components, such as `10GB/s` or `25Gbit/s`."""
    latency: Seconds = 0.0
    """Seconds that any message takes, such as `20us`."""
    send: Link | None = None
    """A message between two components, as measured: a link, or the list of its points."""
    all_reduce: Link | None = Field(default=None, alias="all-reduce")
    """An all-reduce over all components of the level, as measured."""
    all_gather: Link | None = Field(default=None, alias="all-gather")
    """An all-gather over them as the devices of a mesh do it, by the bytes of what each then has.
    Without it a redistribution takes as long for its bytes as an all-reduce, or a message."""

    @field_validator("all_reduce", "all_gather")
    @classmethod
    def _check_ring(cls, ring: Link | None, info: ValidationInfo) -> Link | None:
        if ring is not None and info.data.get("count") == 1:
            name = str(info.field_name).replace("_", "-")
            raise ValueError(f"a level with one component has no {name}")
        return ring


class _ClusterFile(ArtifactModel):
    """A cluster."""

    format: Literal["pipedream-cluster/1"]
    """Always `pipedream-cluster/1`."""
    levels: tuple[_LevelEntry, ...] = Field(min_length=1)
    """Innermost first."""
    kinds: tuple[DeviceType, ...] = ()
    """Kinds of devices; by default all are as the one that was profiled."""
    machine_kinds: tuple[str, ...] = Field(default=(), validate_default=True)
    """Name of the kind of each component of the outermost level; needed with several kinds."""

    @field_validator("kinds")
    @classmethod
    def _check_names(cls, kinds: tuple[DeviceType, ...]) -> tuple[DeviceType, ...]:
        check_kinds(kinds, tuple(kind.name for kind in kinds), len(kinds))
        return kinds

    @field_validator("machine_kinds")
    @classmethod
    def _check_kinds(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if "levels" not in info.data or "kinds" not in info.data:  # they are wrong themselves
            return names
        kinds, count = info.data["kinds"], info.data["levels"][-1].count
        if len(kinds) == 1 and not names:
            names = (kinds[0].name,) * count
        check_kinds(kinds, names, count)
        return names


def read_cluster(path: Path) -> Cluster:
    """Reads a cluster file. Raises UserError that names file, line and field.

    Amounts are numbers (bytes, bytes per second, seconds) or text with a unit: 10GB, 20us.
    """
    file = read_artifact(path, _ClusterFile)
    levels = file.levels
    send = tuple(level.send for level in levels)
    all_reduce = tuple(level.all_reduce for level in levels)
    all_gather = tuple(level.all_gather for level in levels)
    return Cluster(
        machines=tuple(level.count for level in levels),
        bandwidth=tuple(level.bandwidth for level in levels),
        latency=tuple(level.latency for level in levels),
        names=tuple(level.name for level in levels),
        send=send if any(send) else (),
        all_reduce=all_reduce if any(all_reduce) else (),
        all_gather=all_gather if any(all_gather) else (),
        kinds=file.kinds,
        machine_kinds=file.machine_kinds,
    )


def write_cluster(cluster: Cluster, path: Path, notes: Sequence[str] = ()) -> None:
    """Writes a cluster file, with the notes as comments at its head.

    Amounts are rounded to what reads well: sizes to six digits, all else to four.
    """
    lines = [f"# {note}" for note in notes]
    lines += ["format: pipedream-cluster/1", "levels:  # innermost first"]
    for level in range(len(cluster.machines)):
        lines += _level_lines(cluster, level)
    if cluster.kinds:
        lines += ["kinds:", *(f"  - {_type_text(kind)}" for kind in cluster.kinds)]
        lines += [f"machine_kinds: {json.dumps(list(cluster.machine_kinds))}"]
    write_whole(path, "\n".join(lines) + "\n")


def _level_lines(cluster: Cluster, level: int) -> Iterator[str]:
    name = cluster.names[level] if cluster.names else f"level{level + 1}"
    yield f"  - name: {json.dumps(name)}"
    yield f"    count: {cluster.machines[level]}"
    yield f"    bandwidth: {_rate(cluster.bandwidth[level])}"
    if cluster.latency[level]:
        yield f"    latency: {_duration(cluster.latency[level])}"
    for field in ("send", "all_reduce", "all_gather"):
        links = getattr(cluster, field)
        link = links[level] if links else None
        if link is not None:
            yield f"    {field.replace('_', '-')}: {_link_text(link)}"


def _link_text(link: Link) -> str:
    busy = f", busy: {link.busy:.4g}" if link.busy else ""
    if link.bandwidth is not None:
        line = f"latency: {_duration(link.latency)}, bandwidth: {_rate(link.bandwidth)}"
        return f"{{{line}{busy}}}"
    points = ", ".join(f"[{_amount(size)}, {_duration(time)}]" for size, time in link.points)
    return f"{{points: [{points}]{busy}}}" if busy else f"[{points}]"


def _type_text(kind: DeviceType) -> str:
    memory = "" if kind.memory is None else f", memory: {_amount(kind.memory)}"
    return f"{{name: {json.dumps(kind.name)}, speed: {kind.speed:.6g}{memory}}}"


def _amount(size: float) -> str:
    return show_bytes(size, digits=6).replace(" ", "")


def _rate(bandwidth: float) -> str:
    return show_bytes(bandwidth, digits=4).replace(" ", "") + "/s"


def _duration(seconds: float) -> str:
    return show_seconds(seconds).replace(" ", "")
