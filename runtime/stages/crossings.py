"""How the values that a stage exchanges with others lie on the devices of either side.

All ranks find the same from the plan and the captured model. A value comes to a stage as its plan
says (by the node that makes it, or as `input 0`), whole by default. It leaves the stage before as
it is to come, if the meshes of the two are alike, so that nothing has to be gathered for it; else
it leaves whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from pipedream.capture.captured import Captured, Value
from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.graph.placements.placement import Mesh, Placements, Replicate
from pipedream.graph.plan import Plan, Stage
from pipedream.runtime.stages.partition import StageInterface
from pipedream.sharding.assignment import LinkedMesh
from pipedream.sharding.tiles import TileTransfers, match_tiles


@dataclass(frozen=True)
class Side:
    """The devices of a stage that hold a value, and how. `ranks`: of its first replica."""

    mesh: Mesh
    placements: Placements
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Crossing:
    """A value that `source` sends to `target`; its gradient comes back."""

    value: Value
    source: Side
    target: Side
    cluster: Cluster

    @cached_property
    def there(self) -> TileTransfers:
        return _transfers(self.value.shape, self._bytes, self.source, self.target, self.cluster)

    @cached_property
    def back(self) -> TileTransfers:
        return _transfers(self.value.shape, self._bytes, self.target, self.source, self.cluster)

    @property
    def _bytes(self) -> int:
        return self.value.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Crossings:
    """The values that cross to and from a stage, by the other stage, as the message has them."""

    receives: Mapping[int, tuple[Crossing, ...]]
    sends: Mapping[int, tuple[Crossing, ...]]

    @cached_property
    def received(self) -> Mapping[str, Placements]:
        """How each value comes to the stage, by name."""
        every = (crossing for own in self.receives.values() for crossing in own)
        return {each.value.name: each.target.placements for each in every}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of all of each value that comes, by name."""
        every = (crossing for own in self.receives.values() for crossing in own)
        return {each.value.name: tuple(each.value.shape) for each in every}

    @cached_property
    def sent(self) -> Mapping[str, Placements]:
        """How each value leaves the stage."""
        every = (crossing for own in self.sends.values() for crossing in own)
        return {each.value.name: each.source.placements for each in every}


def crossings(
    captured: Captured, plan: Plan, interfaces: Sequence[StageInterface], stage: int
) -> Crossings:
    """Raises UserError for placements that the values cannot have."""
    taken = {each.stage: _taken(captured, plan.stages[each.stage], each) for each in interfaces}
    own = interfaces[stage]

    def between(source: int, target: int, values: Sequence[Value]) -> tuple[Crossing, ...]:
        there = plan.stages[target]
        return tuple(
            Crossing(
                value,
                _side(plan.stages[source], _leaving(plan, interfaces[source], taken, value)),
                _side(there, taken[target].get(value.name, _whole(there))),
                plan.cluster,
            )
            for value in values
        )

    return Crossings(
        {source: between(source, stage, values) for source, values in own.receives.items()},
        {target: between(stage, target, values) for target, values in own.sends.items()},
    )


def _taken(captured: Captured, stage: Stage, interface: StageInterface) -> dict[str, Placements]:
    """Returns how a stage takes the values whose places its plan says."""
    if stage.mesh is None or stage.placements is None:
        return {}
    by_node = stage.placements.taken(len(stage.mesh))
    requested = stage.placements.requests(len(stage.mesh)).values
    numbers = [name for name in requested if name.startswith("input ")]
    inputs = interface.build(captured).inputs if numbers else ()
    values = (value for own in interface.receives.values() for value in own)
    return {each.name: by_node[each.node] for each in values if each.node in by_node} | {
        name: requested[f"input {number}"]
        for number, name in enumerate(inputs)
        if f"input {number}" in requested
    }


def _leaving(
    plan: Plan, source: StageInterface, taken: Mapping[int, Mapping[str, Placements]], value: Value
) -> Placements:
    """Returns how all take it who have meshes like that of the source; else whole."""
    here = plan.stages[source.stage]
    readers = [stage for stage, values in source.sends.items() if value in values]
    requested = {
        taken[stage].get(value.name, _whole(here))
        for stage in readers
        if plan.stages[stage].mesh == here.mesh
    }
    alike = len(requested) == 1 and all(plan.stages[stage].mesh == here.mesh for stage in readers)
    return requested.pop() if alike else _whole(here)


def _whole(stage: Stage) -> Placements:
    return (Replicate(),) * len(stage.mesh or ())


def _side(stage: Stage, placements: Placements) -> Side:
    return Side(stage.mesh or (), placements, stage.teams[0].ranks)


@lru_cache(maxsize=10_000)
def _transfers(
    shape: tuple[int, ...], element_bytes: int, source: Side, target: Side, cluster: Cluster
) -> TileTransfers:
    """Lets the devices of the target gather what they hold alike where that is faster."""
    sides = (source.mesh, source.placements), (target.mesh, target.placements)
    try:
        direct, shared = (match_tiles(shape, *sides, gather=gather) for gather in (False, True))
    except ValueError as error:
        raise UserError(f"a value of shape {shape} cannot cross between stages: {error}") from error
    if source.ranks == target.ranks or not shared.gathers:
        return direct
    between = cluster.link(cluster.level(source.ranks[0], target.ranks[0]))
    links = LinkedMesh.of(target.mesh, target.ranks, cluster).links
    seconds = [
        float(between.seconds(max(transfers.sent(element_bytes).values())))
        for transfers in (direct, shared)
    ]
    gathered = max(shared.gathered(element_bytes).values())
    seconds[1] += max(float(link.seconds(gathered)) for link in links)
    return shared if seconds[1] < seconds[0] else direct
