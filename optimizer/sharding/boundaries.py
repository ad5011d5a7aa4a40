"""What it takes that values cross between stages on meshes: a value leaves a stage as the next
takes it if their meshes are alike, else whole, and a stage takes it as the first operator that
reads it wants it (as runtime/stages/crossings.py does, which is told so by the plan).

In the passes of a whole model a value is brought from where it is made to each placement in which
it is read. In those of a stage it is brought to the placements that the stage itself needs, and to
the one in which it leaves; from that in which it comes the next stage does the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from pipedream.graph.placements.operators import OperatorGraph, TensorType
from pipedream.graph.placements.placement import Partial, Placements, Replicate
from pipedream.optimizer.sharding.model_sharding import ModelSharding
from pipedream.sharding.assignment import steps_between

Pass: TypeAlias = tuple[str, bool]
"""A node, and whether its backward pass."""


class _Reader(NamedTuple):
    """The node and pass of a call, and which of the values that it reads it is."""

    node: str
    backward: bool
    call: str
    number: int


@dataclass
class _Crossable:
    """A value that nodes read besides the one that makes it."""

    value: str
    type: TensorType
    maker: str
    backward: bool
    readers: list[_Reader] = field(default_factory=list)


@dataclass(frozen=True)
class Boundaries:
    """`shardings`: one for each mesh, None for single devices; of the same operators."""

    shardings: Sequence[ModelSharding | None]
    forward: Sequence[_Crossable]
    backward: Sequence[_Crossable]

    @staticmethod
    def of(shardings: Sequence[ModelSharding | None]) -> Boundaries:
        known = next((each for each in shardings if each is not None), None)
        if known is None:
            return Boundaries(shardings, (), ())
        graph, nodes, later = known.assignment.graph, known.profile.nodes, known.backward
        found = [each for each in _crossable(graph, nodes, later) if _leaves_its_node(each)]
        return Boundaries(
            shardings,
            [each for each in found if not each.backward],
            [each for each in found if each.backward],
        )

    def seconds(self, stage_of: Mapping[str, int], meshes: Sequence[int]) -> Counter[Pass]:
        """What passes take more, or less, than in the whole model, if the stages have these meshes:
        of the device that was profiled.
        """
        at = _Places(self, stage_of, meshes)
        found: Counter[Pass] = Counter()
        for value in (*self.forward, *self.backward):
            at.add(value, found)
        return found

    def taken(
        self, stage_of: Mapping[str, int], meshes: Sequence[int]
    ) -> list[dict[str, Placements]]:
        """For each stage on a mesh: how it takes what a node of another stage gives, by the node.
        That which is not there comes whole.
        """
        at = _Places(self, stage_of, meshes)
        found: list[dict[str, Placements]] = [{} for _ in meshes]
        for value in self.forward:
            for stage in at.readers(value).keys() - {stage_of[value.maker]}:
                placements = at.comes(value.maker, stage)
                if any(each != Replicate() for each in placements):
                    found[stage][value.maker] = placements
        return found

    @cached_property
    def given(self) -> Mapping[str, Sequence[_Crossable]]:
        """By node the values of its forward pass that others read."""
        found: dict[str, list[_Crossable]] = defaultdict(list)
        for each in self.forward:
            found[each.maker].append(each)
        return found


class _Places:
    """Where the values of some stages are, and how they are placed there."""

    def __init__(
        self, known: Boundaries, stage_of: Mapping[str, int], meshes: Sequence[int]
    ) -> None:
        self.known, self.stage_of, self.meshes = known, stage_of, meshes
        self._comes: dict[tuple[str, int], Placements] = {}

    def sharding(self, stage: int) -> ModelSharding | None:
        return self.known.shardings[self.meshes[stage]]

    def readers(self, value: _Crossable) -> dict[int, list[_Reader]]:
        """By stage."""
        found: dict[int, list[_Reader]] = {}
        for reader in value.readers:
            found.setdefault(self.stage_of[reader.node], []).append(reader)
        return found

    def add(self, value: _Crossable, found: Counter[Pass]) -> None:
        """Adds what it takes that the value crosses, if it does."""
        here, by_stage = self.stage_of[value.maker], self.readers(value)
        others = by_stage.keys() - {here}
        sharding = self.sharding(here)
        if others and sharding is not None:
            source = sharding.assignment.placed[value.value]
            in_all = _targets(value.readers, sharding)
            own = _targets(by_stage.get(here, ()), sharding)
            own |= {self._leaves(value, here, other) for other in others}
            moved = _seconds(value.type, sharding, source, own)
            counted = _seconds(value.type, sharding, source, in_all)
            found[value.maker, value.backward] += moved - counted  # type: ignore[assignment]
        for stage in others:
            sharding = self.sharding(stage)
            if sharding is not None:
                source, readers = self._arrives(value, here, stage), by_stage[stage]
                taken = _seconds(value.type, sharding, source, _targets(readers, sharding))
                first = readers[0]
                found[first.node, first.backward] += taken  # type: ignore[assignment]

    def comes(self, node: str, stage: int) -> Placements:
        """How a stage takes what a node of an earlier one gives: as the first that reads it wants
        it, if that is the same for all its values.
        """
        key = node, stage
        if key not in self._comes:
            sharding = self.sharding(stage)
            wanted = {
                target
                for value in self.known.given.get(node, ())
                if (readers := self.readers(value).get(stage))
                for target in [_first_target(readers, sharding)]
            }
            alike = len(wanted) == 1
            self._comes[key] = wanted.pop() if alike else _whole(sharding)
        return self._comes[key]

    def _goes(self, node: str, stages: Iterable[int]) -> Placements:
        """How what a node gives leaves its stage for these."""
        here = self.stage_of[node]
        alike = all(self.meshes[stage] == self.meshes[here] for stage in stages)
        wanted = {self.comes(node, stage) for stage in stages} if alike else set()
        return wanted.pop() if len(wanted) == 1 else _whole(self.sharding(here))

    def _leaves(self, value: _Crossable, here: int, there: int) -> Placements:
        """How the value leaves the stage that makes it."""
        if not value.backward:
            return self._goes(value.maker, self.readers(value).keys() - {here})
        forward = self._answered(value, there, here)
        return _whole(self.sharding(here)) if forward is None else self.comes(forward.maker, here)

    def _arrives(self, value: _Crossable, here: int, there: int) -> Placements:
        """How the value comes to another stage."""
        if not value.backward:
            return self.comes(value.maker, there)
        forward = self._answered(value, there, here)
        if forward is None:
            return _whole(self.sharding(there))
        return self._goes(forward.maker, self.readers(forward).keys() - {there})

    def _answered(self, gradient: _Crossable, source: int, target: int) -> _Crossable | None:
        """The value that went from the source to the target and has this gradient: one of its
        shape.
        """
        of_nodes = dict.fromkeys(reader.node for reader in gradient.readers)
        for node in of_nodes:
            if self.stage_of[node] == source:
                for value in self.known.given.get(node, ()):
                    if value.type.shape == gradient.type.shape and target in self.readers(value):
                        return value
        return None


def _crossable(
    graph: OperatorGraph, nodes: Mapping[str, str], later: frozenset[str]
) -> Iterable[_Crossable]:
    types, found = graph.types(), dict[str, _Crossable]()
    for call in graph.calls:
        node, backward = nodes[call.name], call.name in later
        for number, value in enumerate(call.reads):
            if value in found:
                found[value].readers.append(_Reader(node, backward, call.name, number))
        for given in call.results:
            if given is not None:
                found[given] = _Crossable(given, types[given], node, backward)
    return found.values()


def _leaves_its_node(value: _Crossable) -> bool:
    return any(
        reader.node != value.maker and reader.backward == value.backward for reader in value.readers
    )


def _targets(readers: Iterable[_Reader], sharding: ModelSharding) -> set[Placements]:
    return {sharding.assignment.targets(each.call)[each.number] for each in readers}


def _first_target(readers: Sequence[_Reader], sharding: ModelSharding | None) -> Placements:
    if sharding is None:
        return ()
    first = readers[0]
    target = sharding.assignment.targets(first.call)[first.number]
    return _whole(sharding) if Partial() in target else target


def _whole(sharding: ModelSharding | None) -> Placements:
    return () if sharding is None else (Replicate(),) * len(sharding.mesh)


def _seconds(
    type_: TensorType, sharding: ModelSharding, source: Placements, targets: Iterable[Placements]
) -> float:
    """Of bringing a value to all these placements, of the device that was profiled."""
    mesh = sharding.assignment.mesh
    return sharding.speed * sum(
        step.seconds
        for target in targets
        if target != source
        for step in steps_between(type_, mesh, source, target)
    )
