"""The operators of stages divided anew, each for the stage that it is in.

A mesh divides the operators of a whole model first (`ModelSharding.of`): where values cross between
stages that is not always the best, since they come and go whole where the meshes are not alike.
Here stages next to each other on one mesh are a problem of their own, with the minibatches that
they have in flight and the memory that they have. What is not theirs stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

from pipedream.graph.placements.operators import OperatorGraph, StageInput, StageOutput
from pipedream.graph.placements.placement import Placements, Replicate
from pipedream.graph.placements.requests import Requests
from pipedream.graph.profile import Profile
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.intra.costs import Accounting, StageProblem
from pipedream.optimizer.intra.search import Sharding, find_sharding
from pipedream.optimizer.sharding.accounting import accounting, kept_bytes
from pipedream.optimizer.sharding.model_sharding import ModelSharding
from pipedream.optimizer.sharding.views import Views
from pipedream.sharding.assignment import Assignment

_LABELS = 20_000
"""Of all problems that are solved, about, which takes a second or two. Small models are searched
with all their stages divided anew, of large ones only the best that were found: with ten times as
many, 1 of 35 plans of models of 60 to 900 operators became faster, by less than 0.1 %.
"""


class _Run(NamedTuple):
    """Stages next to each other on one mesh, of which these nodes are; `replicas` of each."""

    mesh: int
    nodes: frozenset[str]
    first: int
    replicas: tuple[int, ...]


@dataclass
class StageDivisions:
    """`views`: of each mesh with the operators of the whole model divided."""

    views: Views
    profile: Profile
    labels: int = _LABELS
    """Of problems that may still be solved."""
    _solved: dict[tuple[int, frozenset[str], Accounting], Sharding | None] = field(
        default_factory=dict, init=False
    )

    def of(self, division: Division) -> Views | None:
        """The views with the operators of each stage divided for this division; None where that
        would be too many problems, all in all, or nothing fits.
        """
        own: dict[int, list[Sharding]] = {}
        solves = self.labels > 0  # once for all of its stages
        for run in self._runs(division):
            found = self._best(run, len(division.meshes), solves)
            if found is None:
                return None
            own.setdefault(run.mesh, []).append(found)
        shardings = [
            self._merged(number, own.get(number, [])) for number in range(1, len(self.views.views))
        ]
        return self.views.with_shardings(shardings, self.profile)

    def _runs(self, division: Division) -> Iterator[_Run]:
        stage_of, meshes = self.views.stage_of(division), division.meshes
        first = 0
        while first < len(meshes):
            end = first + 1
            while end < len(meshes) and meshes[end] == meshes[first]:
                end += 1
            if meshes[first]:
                nodes = frozenset(name for name, s in stage_of.items() if first <= s < end)
                yield _Run(meshes[first], nodes, first, division.replicas[first:end])
            first = end

    def _best(self, run: _Run, stages: int, solves: bool) -> Sharding | None:
        counted = self._accounting(run, stages)
        key = run.mesh, run.nodes, counted
        if key not in self._solved:
            if not solves:
                return None
            problem = self._problem(run, counted)
            self.labels -= sum(map(len, problem.problem.seconds))
            self._solved[key] = find_sharding(problem, "exact")
        return self._solved[key]

    def _accounting(self, run: _Run, stages: int) -> Accounting:
        """Of its stages on average: as many minibatches in flight as there are stages from each to
        the last.
        """
        request, count = self.views.request, len(run.replicas)
        whole = accounting(request, self._sharding(run.mesh).mesh)
        after = [stages - (run.first + k) for k in range(count)]
        copies = sum(ceil(n / r) for n, r in zip(after, run.replicas, strict=True)) / count
        types = request.device_types
        limit = count * types.smallest_memory if types.memory_limited else None
        return replace(whole, activation_copies=max(1.0, copies), limit=limit)

    def _problem(self, run: _Run, counted: Accounting) -> StageProblem:
        sharding = self._sharding(run.mesh)
        operators, before = sharding.profile, sharding.assignment
        names = {call.name for call in operators.graph.calls if self._node(call.name) in run.nodes}
        graph = part_of(operators.graph, names)
        whole = (Replicate(),) * len(sharding.mesh)
        held: dict[str, Placements] = {}
        outside = self._read_outside(names)
        for given in graph.inputs:
            if given.role in ("input", "tangent"):
                held[given.value] = whole
            elif given.value in outside:  # one placement for all that read it
                held[given.value] = before.placed[given.value]
        seconds = {name: operators.seconds.get(name, 0.0) / sharding.speed for name in names}
        return StageProblem(
            *(graph, before.mesh, seconds, sharding.backward & names, counted),
            *(Requests(values=held), self._kept, sharding.local_times),
        )

    def _merged(self, mesh: int, found: list[Sharding]) -> ModelSharding:
        """The sharding of the whole model with these in place of its own."""
        sharding = self._sharding(mesh)
        if not found:
            return sharding
        strategies, placed = dict(sharding.assignment.strategies), dict(sharding.assignment.placed)
        for each in found:
            strategies |= each.assignment.strategies
            given = {e.value for e in each.assignment.graph.inputs if e.role in _CROSSING}
            placed |= {v: its for v, its in each.assignment.placed.items() if v not in given}
        whole = sharding.assignment
        assignment = Assignment(whole.graph, whole.mesh, strategies, placed)
        sums = (sum(each.seconds for each in found), sum(each.bound for each in found))
        summed = Sharding(assignment, "exact", *sums, of_stages=True)
        return replace(sharding, assignment=assignment, found=summed)

    def _sharding(self, mesh: int) -> ModelSharding:
        found = self.views.views[mesh].sharding
        assert found is not None
        return found

    def _node(self, call: str) -> str:
        return self._sharding(1).profile.nodes[call]

    def _read_outside(self, names: Set[str]) -> set[str]:
        """What the whole graph is given and others read."""
        graph = self._sharding(1).profile.graph
        return {v for call in graph.calls if call.name not in names for v in call.reads}

    @cached_property
    def _kept(self) -> Mapping[str, float]:
        footprints = self.views.request.footprints
        return {} if footprints is None else kept_bytes(self._sharding(1).profile, footprints)


_CROSSING = ("input", "tangent")


def part_of(graph: OperatorGraph, names: Set[str]) -> OperatorGraph:
    """The calls with these names: a value of others that they read is an input, one of theirs that
    others read is an output.
    """
    calls = tuple(call for call in graph.calls if call.name in names)
    types = graph.types()
    made = {v for call in calls for v in call.results if v is not None}
    read = dict.fromkeys(v for call in calls for v in call.reads)
    outputs = [each for each in graph.outputs if each.value in made]
    kept = {each.name for each in outputs if each.role == "parameter gradient"}
    inputs = [
        each
        for each in graph.inputs
        if each.value in read or (each.role == "parameter" and each.name in kept)
    ]
    known = {each.value for each in inputs} | made
    inputs += (
        StageInput(value=value, role="input", name=f"from {value}", type=types[value])
        for value in read
        if value not in known
    )
    given = {each.name for each in inputs if each.role == "input"}
    later = {v for call in graph.calls if call.name not in names for v in call.reads}
    outputs = [each for each in outputs if each.role != "input gradient" or each.name in given]
    outputs += (
        StageOutput(value=value, role="output", name=f"of {value}")
        for value in sorted(made & later)
    )
    return OperatorGraph(inputs=tuple(inputs), calls=calls, outputs=tuple(outputs))
