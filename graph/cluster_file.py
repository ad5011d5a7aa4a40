"""The cluster file: levels, measured links, kinds of device. YAML, `pipedream-cluster/1`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from pipedream.graph.cluster import Cluster, DeviceType, Link, Seconds, SomeBytes, check_kinds
from pipedream.graph.command import write_whole
from pipedream.graph.errors import ArtifactModel, read_artifact
from pipedream.graph.units import show_bytes, show_seconds


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

    @field_validator("all_reduce")
    @classmethod
    def _check_ring(cls, ring: Link | None, info: ValidationInfo) -> Link | None:
        if ring is not None and info.data.get("count") == 1:
            raise ValueError("a level with one component has no all-reduce")
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
    return Cluster(
        machines=tuple(level.count for level in levels),
        bandwidth=tuple(level.bandwidth for level in levels),
        latency=tuple(level.latency for level in levels),
        names=tuple(level.name for level in levels),
        send=send if any(send) else (),
        all_reduce=all_reduce if any(all_reduce) else (),
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
    for field, links in (("send", cluster.send), ("all-reduce", cluster.all_reduce)):
        link = links[level] if links else None
        if link is not None:
            yield f"    {field}: {_link_text(link)}"


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
