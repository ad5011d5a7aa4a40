"""How the operators of a whole model are divided on the mesh that each worker is to be."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from pipedream.graph.choices import IntraOp
from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import (
    Operator,
    OperatorCall,
    OperatorProfile,
    TensorType,
    estimated_seconds,
    flops,
)
from pipedream.graph.placements.placement import (
    Mesh,
    Placements,
    Replicate,
    device_count,
    parse_placements,
)
from pipedream.graph.placements.requests import Requests
from pipedream.optimizer.intra.costs import Accounting, StageProblem
from pipedream.optimizer.intra.search import Sharding, find_sharding
from pipedream.sharding.assignment import Assignment, LinkedMesh
from pipedream.sharding.local_times import LocalTimes

_PLAIN = Accounting()


@dataclass(frozen=True)
class ModelSharding:
    """`cluster`: of all devices; `profile`: of the operators before they were divided; `found`: how
    the assignment was found, and how good it is.
    """

    cluster: Cluster
    profile: OperatorProfile
    assignment: Assignment
    found: Sharding | None = None
    minibatches: float = 1.0
    """Of an update, on one worker."""

    @staticmethod
    def of(
        mesh: Mesh,
        shards: Sequence[str],
        profile: OperatorProfile,
        cluster: Cluster,
        method: IntraOp = "propagate",
        accounting: Accounting = _PLAIN,
        kept: Mapping[str, float] | None = None,
    ) -> ModelSharding:
        """`shards`: as typed, `PATTERN=PLACEMENTS`; `kept`: as in `StageProblem`. Raises UserError,
        also if nothing is divided.
        """
        devices = device_count(mesh)
        _check_devices(cluster, devices)
        requests = Requests(_parameters(shards, len(mesh), profile), whole_ends(profile, len(mesh)))
        linked = LinkedMesh.of(mesh, range(devices), cluster)
        speed = cluster.device(0).speed
        seconds = {name: taken / speed for name, taken in profile.seconds.items()}
        if method == "propagate":
            seconds = estimated_seconds(profile.graph, rate_on(profile, cluster))
        stage = StageProblem(
            *(profile.graph, linked, seconds, profile.graph.backward_calls()),
            *(accounting, requests, kept or {}, LocalTimes.of(profile.local_seconds)),
        )
        try:
            found = find_sharding(stage, method)
        except UserError as error:
            raise UserError(f"--shard: {error.format_message()}") from error
        if found is None:
            raise UserError(
                f"--mesh: the model does not fit {devices} devices of a team each, however it is"
                " divided: give more --memory, or a larger --mesh"
            )
        sharding = ModelSharding(cluster, profile, found.assignment, found, accounting.minibatches)
        if devices > 1 and not any(map(sharding.divides, profile.graph.calls)):
            raise UserError(_nothing_divided(profile, mesh, method))
        return sharding

    @property
    def speed(self) -> float:
        """Of all devices."""
        return self.cluster.device(0).speed

    @property
    def flops_per_second(self) -> float | None:
        """On these devices; None if it is not known."""
        return rate_on(self.profile, self.cluster)

    @property
    def mesh(self) -> Mesh:
        return self.assignment.mesh.sizes

    @property
    def devices(self) -> int:
        return device_count(self.mesh)

    @cached_property
    def teams(self) -> Cluster:
        """The cluster of which each device is a team: neighbours of the innermost level."""
        first, *others = self.cluster.machines
        machines = (first // self.devices, *others)
        fields: dict[str, object] = {"machines": machines}
        if len(machines) == 1:  # where each device is a machine
            fields["machine_kinds"] = self.cluster.machine_kinds[:: self.devices]
        for name in ("all_reduce", "all_gather"):  # were measured over all devices of a level
            if rings := getattr(self.cluster, name):
                fields[name] = (None, *rings[1:])
        return self.cluster.model_copy(update=fields)

    @cached_property
    def parameters(self) -> Mapping[str, Placements]:
        """By name, of buffers too."""
        placed = self.assignment.placed_inputs.items()
        return {name: its for (role, name), its in placed if role in ("parameter", "buffer")}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the whole parameters and buffers."""
        inputs = self.assignment.graph.inputs
        return {e.name: e.type.shape for e in inputs if e.role in ("parameter", "buffer")}

    @cached_property
    def operators(self) -> Mapping[str, Operator]:
        """By the name of a call."""
        return {call.name: call.operator for call in self.assignment.graph.calls}

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """Of all values."""
        return self.assignment.graph.types()

    @cached_property
    def backward(self) -> frozenset[str]:
        """The calls of the backward pass."""
        return self.assignment.graph.backward_calls()

    @cached_property
    def call_of(self) -> Mapping[str, str]:
        """By value the call that computes it or within which it is added up, or the first that
        reads it.
        """
        calls = self.assignment.graph.calls
        found = {value: call.name for call in reversed(calls) for value in call.reads}
        for call in calls:
            found |= {v: call.name for v in (call.name, *call.results) if v is not None}
        return found

    @cached_property
    def local_times(self) -> LocalTimes:
        return LocalTimes.of(self.profile.local_seconds)

    def divides(self, call: OperatorCall) -> bool:
        """Tells whether a device does a part of an operator's work alone."""
        return any(strategy.shards for strategy in self.assignment.strategies[call.name])

    def work_share(self, call: OperatorCall) -> float:
        """The part of an operator's seconds that the slowest device takes."""
        strategies = self.assignment.strategies[call.name]
        return self.local_times.share(call.operator, strategies, self.mesh)

    def untimed_share(self, nodes: Collection[str]) -> float:
        """What part of the seconds that a device computes of these nodes is of parts of operators
        that were not timed.
        """
        seconds = {True: 0.0, False: 0.0}
        for call in self.assignment.graph.calls:
            if self.profile.nodes[call.name] in nodes:
                chosen = self.assignment.strategies[call.name]
                timed = self.local_times.is_timed(call.operator, chosen, self.mesh)
                seconds[timed] += self.profile.seconds.get(call.name, 0.0) * self.work_share(call)
        return seconds[False] / (sum(seconds.values()) or 1.0)


def flops_per_second(profile: OperatorProfile) -> float | None:
    """Of the operators that have `flops`, together; None if none was timed."""
    counts = {call.name: flops(call.operator) for call in profile.graph.calls}
    seconds = sum(profile.seconds.get(name, 0.0) for name, count in counts.items() if count)
    return sum(counts.values()) / seconds if seconds else None


def rate_on(profile: OperatorProfile, cluster: Cluster) -> float | None:
    """`flops_per_second` on the devices of the cluster."""
    profiled = flops_per_second(profile)
    return None if profiled is None else profiled * cluster.device(0).speed


def _nothing_divided(profile: OperatorProfile, mesh: Mesh, method: IntraOp) -> str:
    devices = device_count(mesh)
    if method == "propagate":
        return (
            f"--mesh: nothing is divided among the {devices} devices of a team, which would all"
            " do the same: say which parameters are, with --shard, such as --shard"
            f" '{_example(profile)}=S(0)" + ",R" * (len(mesh) - 1) + "', or leave --mesh out"
        )
    return (
        f"--mesh: nothing is worth dividing among the {devices} devices of a team, which would all"
        " do the same: leave --mesh out, or say with --shard what is to be divided"
    )


def _check_devices(cluster: Cluster, devices: int) -> None:
    """Raises UserError unless teams of so many devices divide the innermost level, not all devices
    are as fast, or those of a team are not of one type.
    """
    if cluster.machines[0] % devices:
        raise UserError(
            f"--mesh: teams of {devices} devices do not divide the {cluster.machines[0]} of the"
            " innermost level: give --machines with a multiple of it"
        )
    speeds = {cluster.device(rank).speed for rank in range(cluster.devices)}
    if len(speeds) > 1:
        raise UserError(
            "--mesh: the devices of the cluster have several speeds,"
            f" {' and '.join(f'{speed:g}' for speed in sorted(speeds))}: plan for those of one"
        )
    for first in range(0, cluster.devices, devices):
        names = {cluster.device(rank).name for rank in range(first, first + devices)}
        if len(names) > 1:
            raise UserError(
                f"--mesh: the {devices} devices of a team would be of several types,"
                f" {' and '.join(sorted(names))}: give machines whose devices are alike"
            )


def _example(profile: OperatorProfile) -> str:
    """The name of a parameter that can be divided."""
    inputs = profile.graph.inputs
    matrices = (e.name for e in inputs if e.role == "parameter" and len(e.type.shape) > 1)
    return next(matrices, "*.weight")


def _parameters(
    shards: Sequence[str], axes: int, profile: OperatorProfile
) -> dict[str, Placements]:
    """By pattern. A pattern of modules stands for their weights. Raises UserError."""
    names = [e.name for e in profile.graph.inputs if e.role in ("parameter", "buffer")]
    found: dict[str, Placements] = {}
    for text in shards:
        pattern, sign, written = text.partition("=")
        if not sign or not pattern.strip():
            raise UserError(f"--shard {text}: write PATTERN=PLACEMENTS, such as *.up.weight=S(0)")
        try:
            placements = parse_placements(written)
        except ValueError as error:
            raise UserError(f"--shard {text}: {error}") from error
        if len(placements) != axes:
            raise UserError(
                f"--shard {text}: {len(placements)} placements for a mesh of {axes} axes: write one"
                " for each, such as " + ",".join(["S(0)", *["R"] * (axes - 1)])
            )
        pattern = pattern.strip()
        if not any(fnmatchcase(name, pattern) for name in names):
            weights = f"{pattern}.weight"
            pattern = weights if any(fnmatchcase(n, weights) for n in names) else pattern
        found[pattern] = placements
    return found


def whole_ends(profile: OperatorProfile, axes: int) -> dict[str, Placements]:
    """What comes to the model, and gradients of what leaves it, are whole."""
    ends = (e for e in profile.graph.inputs if e.role in ("input", "tangent"))
    return {f"{each.role} {each.name}": (Replicate(),) * axes for each in ends}
