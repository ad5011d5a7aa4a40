"""From placements that a user sets to a division of all operators, breadth first.

As MindSpore's strategy propagation: each operator next to those that are decided takes the strategy
with the least redistribution to and from its decided neighbours; then its own neighbours follow. It
begins at what is divided, as all could be whole next to what is whole.
The axes of the mesh are decided one after the other.

Two things are added. An operator that reads a partial sum and hands it on, or takes a part of it,
counts what it will take until all devices have all of it, so that this is not put off where it
saves nothing. And at the end each operator looks again at all its neighbours, until nothing becomes
cheaper. Sums of the gradients of parameters count
nothing, since there is one for all the minibatches of an update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import OperatorGraph, StageInput
from pipedream.graph.placements.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    show_placements,
)
from pipedream.graph.placements.requests import Requests, requested_operators, requested_values
from pipedream.sharding.assignment import Assignment, LinkedMesh, output_target
from pipedream.sharding.axis import AxisProblem, reads, results
from pipedream.sharding.local_times import LocalTimes
from pipedream.sharding.rules.strategy import Strategy

_Cost: TypeAlias = tuple[float, int, int, int, int]
"""Seconds, how many redistributions there are (and sums within the operator), a mark for what is
likely to cost more later, bytes that a device holds, and how many sums the operator gives.
"""
_MOST_ROUNDS = 20
_NOTHING: Mapping[str, float] = MappingProxyType({})
_DECIDED: Mapping[str, tuple[Strategy, ...]] = MappingProxyType({})


def propagate(
    graph: OperatorGraph,
    mesh: LinkedMesh,
    requests: Requests,
    seconds: Mapping[str, float] = _NOTHING,
    decided: Mapping[str, tuple[Strategy, ...]] = _DECIDED,
) -> Assignment:
    """Divides all operators of the graph. Those that no request leads to are replicated.

    `decided`: the strategies of calls of which there is nothing left to find.

    `seconds`: what the calls with these names take on one device, if that is to count, too. Then an
    operator is not replicated to save a redistribution that takes less than it.

    The same arguments give the same assignment in every process. Raises UserError for a request
    that cannot be met.
    """
    values = requested_values(graph, mesh.sizes, requests)
    operators = requested_operators(graph, mesh.sizes, requests)
    requested = [*values.values(), *(each for inputs in operators.values() for each in inputs)]
    placements = frozenset(each for group in requested for each in group)
    times = LocalTimes()  # not those of a profile, which a stage that starts does not have
    placed: dict[str, Placements] = dict.fromkeys(graph.types(), ())
    chosen: dict[str, tuple[Strategy, ...]] = {call.name: () for call in graph.calls}
    for axis in range(len(mesh.sizes)):
        problem = AxisProblem(graph, mesh.first(axis + 1), placed, chosen, placements)
        axis_strategies = _AxisSearch(
            problem,
            {value: each[axis] for value, each in values.items()},
            {name: tuple(each[axis] for each in inputs) for name, inputs in operators.items()},
            seconds,
            times,
            {name: each[axis] for name, each in decided.items()},
        ).run()
        placed = {
            value: (*before, axis_strategies[name].outputs[number])
            for value, before in placed.items()
            for name, number in [problem.producers[value]]
        }
        chosen = {name: (*before, axis_strategies[name]) for name, before in chosen.items()}
    return Assignment(graph, mesh, chosen, placed)


@dataclass
class _AxisSearch:
    """Finds a strategy of each node of a problem."""

    problem: AxisProblem
    values: Mapping[str, Placement]
    operators: Mapping[str, tuple[Placement, ...]]
    seconds: Mapping[str, float]
    times: LocalTimes
    decided: Mapping[str, Strategy]
    chosen: dict[str, Strategy] = field(default_factory=dict)

    def run(self) -> dict[str, Strategy]:
        self.chosen |= {name: each[0] for name, each in self._options.items() if len(each) == 1}
        divided = (value for value, each in self.values.items() if each != Replicate())
        producers = (self.problem.producers[value][0] for value in divided)
        reached = dict.fromkeys([*producers, *self.operators])
        waiting = deque(reached)
        while waiting:
            name = waiting.popleft()
            if name not in self.chosen:
                self.chosen[name] = self._best(name, ahead=True)
            for near in self.problem.neighbours(name):
                if near not in reached:
                    reached[near] = None
                    waiting.append(near)
        for name in self.problem.nodes:
            self.chosen.setdefault(name, self._options[name][0])
        self._improve(reached)
        self._check_written()
        return self.chosen

    @cached_property
    def _options(self) -> dict[str, tuple[Strategy, ...]]:
        """Returns the strategies of each node that requests leave."""
        options = {
            name: (self.decided[name],) if name in self.decided else self.problem.options(name)
            for name in self.problem.nodes
        }
        for value, placement in self.values.items():
            name, number = self.problem.producers[value]
            if isinstance(self.problem.nodes[name], StageInput):
                options[name] = (Strategy((), (placement,)),)
                continue
            left = [each for each in options[name] if each.outputs[number] == placement]
            if not left:
                possible = {each.outputs[number] for each in options[name]}
                raise UserError(
                    f"values.{value}: {self._target(name)} cannot give it {_show([placement])} on "
                    f"axis {self._axis}: choose one of {_choices((each,) for each in possible)}"
                )
            options[name] = tuple(left)
        for name, inputs in self.operators.items():
            left = [each for each in options[name] if each.inputs == inputs]
            if not left:
                possible_inputs = dict.fromkeys(each.inputs for each in options[name])
                raise UserError(
                    f"operators.{name}: {self._target(name)} cannot be divided {_show(inputs)} on "
                    f"axis {self._axis}: choose one of {_choices(possible_inputs)}"
                )
            options[name] = tuple(left)
        return options

    def _improve(self, reached: Iterable[str]) -> None:
        """Each change makes the sum of all costs smaller, so there is an end."""
        free = [name for name in reached if len(self._options[name]) > 1]
        for _ in range(_MOST_ROUNDS):
            changes = 0
            for name in free:
                best = self._best(name)
                if self._cost(name, best) < self._cost(name, self.chosen[name]):
                    self.chosen[name] = best
                    changes += 1
            if not changes:
                break

    def _best(self, name: str, ahead: bool = False) -> Strategy:
        """Returns the cheapest strategy; of those that cost as much the first."""
        return min(self._options[name], key=lambda each: self._cost(name, each, ahead))

    def _cost(self, name: str, strategy: Strategy, ahead: bool = False) -> _Cost:
        """Returns the cost of what depends on the node, as far as it is decided."""
        before = self.chosen.get(name)
        self.chosen[name] = strategy
        costs = [self._value_cost(value) for value in self.problem.affected(name)]
        costs.append(self.problem.inner_cost(name, strategy))
        seconds = [each for each, _ in costs]
        seconds.append(self._work(name, strategy))
        put_off = ahead and self._puts_off(name, strategy)
        if put_off:
            seconds += self._later(name)
        if before is None:
            del self.chosen[name]
        else:
            self.chosen[name] = before
        held_bytes = sum(
            self.problem.held_bytes(value, placement)
            for value, placement in zip(
                results(self.problem.nodes[name]), strategy.outputs, strict=True
            )
            if value is not None
        )
        sums = strategy.outputs.count(Partial())
        count = sum(count for _, count in costs)
        worse = (not sums if self._gives_gradient(name) else put_off) if ahead else False
        return _rounded(math.fsum(seconds)), count, worse, held_bytes, sums

    def _work(self, name: str, strategy: Strategy) -> float:
        """Returns the seconds that a device computes."""
        node, whole = self.problem.nodes[name], self.seconds.get(name, 0.0)
        if isinstance(node, StageInput) or not whole:
            return 0.0
        strategies = (*self.problem.chosen[name], strategy)
        return whole * self.times.share(node.operator, strategies, self.problem.mesh.sizes)

    def _gives_gradient(self, name: str) -> bool:
        """Tells whether the node gives the gradient of a parameter that is not known to be sharded:
        it may stay partial, and whatever comes before it can become partial at no cost, so that is
        the best guess for now.
        """
        values = [value for value in results(self.problem.nodes[name]) if value is not None]
        outputs = [output for value in values for output in self.problem.outputs[value]]
        return any(
            output.role == "parameter gradient"
            and not any(
                isinstance(each[-1], Shard)
                for each in self._placed_input("parameter", output.name).values()
            )
            for output in outputs
        )

    def _puts_off(self, name: str, strategy: Strategy) -> bool:
        """Tells whether a sum that the operator reads is not whole on all devices after it."""
        node = self.problem.nodes[name]
        sources = [self._placed(value) for value in reads(node)]
        return any(
            source is not None and source[-1] == Partial() and wanted != Replicate()
            for source, wanted in zip(sources, strategy.inputs, strict=True)
        )

    def _later(self, name: str) -> list[float]:
        """Returns the seconds to replicate the outputs that nobody has asked for."""
        later = []
        for value in results(self.problem.nodes[name]):
            source = self._placed(value) if value is not None else None
            if value is None or source is None:
                continue
            roles = {output.role for output in self.problem.outputs[value]}
            asked = [each for each in self._targets(value) if each[-1] != Partial()]
            if not asked and "parameter gradient" not in roles:
                later.append(self.problem.seconds(value, source, (*source[:-1], Replicate())))
        return later

    def _value_cost(self, value: str) -> tuple[float, int]:
        """Returns the seconds and number of the redistributions of a value."""
        source = self._placed(value)
        if source is None:
            return 0.0, 0
        targets = [each for each in self._targets(value) if each != source]
        if targets and value in self.problem.written:
            return math.inf, len(targets)
        seconds = [self.problem.seconds(value, source, target) for target in targets]
        return math.fsum(seconds), len(targets)

    def _targets(self, value: str) -> dict[Placements, None]:
        """Returns how the readers that are decided want the value."""
        targets: dict[Placements, None] = {}
        for reader, number in self.problem.readers[value]:
            if reader in self.chosen:
                before = (each.inputs[number] for each in self.problem.chosen[reader])
                targets[(*before, self.chosen[reader].inputs[number])] = None
        source = self._placed(value)
        for output in self.problem.outputs[value]:
            placed_input = self._placed_input(output.role.removesuffix(" gradient"), output.name)
            if source is not None and (placed_input or output.role == "output"):
                targets[output_target(output, source, placed_input)] = None
        return targets

    def _placed_input(self, role: str, name: str) -> dict[tuple[str, str], Placements]:
        """Returns the placement of an input or parameter, if it is decided."""
        value = self.problem.input_values.get((role, name))
        placed = None if value is None else self._placed(value)
        return {} if placed is None else {(role, name): placed}

    def _placed(self, value: str) -> Placements | None:
        name, number = self.problem.producers[value]
        if name not in self.chosen:
            return None
        return *self.problem.placed[value], self.chosen[name].outputs[number]

    def _check_written(self) -> None:
        for value in self.problem.written:
            source = self._placed(value)
            for reader, number in self.problem.readers[value]:
                wanted = self.chosen[reader].inputs[number]
                if source is not None and wanted != source[-1]:
                    raise UserError(
                        f"{value}: it is changed in place, so it stays {_show(source[-1:])} on "
                        f"axis {self._axis}, but {reader} ({self._target(reader)}) needs "
                        f"{_show([wanted])}: choose that placement for it"
                    )

    def _target(self, name: str) -> str:
        node = self.problem.nodes[name]
        return "the stage" if isinstance(node, StageInput) else node.operator.target

    @property
    def _axis(self) -> int:
        return len(self.problem.mesh.sizes) - 1


def _rounded(seconds: float) -> float:
    """Rounds the time, so that sums in another order are equal."""
    return float(f"{seconds:.9e}")


def _show(placements: Iterable[Placement]) -> str:
    return show_placements(tuple(placements))


def _choices(options: Iterable[Iterable[Placement]]) -> str:
    return " | ".join(sorted(map(_show, options)))
