"""What the plan says of the operators of a stage on a mesh.

The plan places some parameters; the operators of the stage's own passes say what follows for the
rest. Every form of the stage (a smaller last minibatch, evaluation) has operators of its own, and
the same parameters in the same placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from pipedream.capture.programs.attribution import node_of_calls
from pipedream.capture.programs.description import describe
from pipedream.capture.programs.joint import Joint
from pipedream.capture.programs.trial import can_be_divided
from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import Operator, OperatorGraph, estimated_seconds
from pipedream.graph.placements.placement import Placements, Replicate
from pipedream.graph.placements.requests import Requests
from pipedream.graph.placements.strategy_texts import NodeStrategies
from pipedream.graph.plan import Plan
from pipedream.runtime.stages.crossings import Crossings
from pipedream.sharding.assignment import Assignment, LinkedMesh
from pipedream.sharding.planned import followed_calls
from pipedream.sharding.propagate import propagate
from pipedream.sharding.rules import RULES
from pipedream.sharding.rules.strategy import Strategy, replicated


@dataclass(frozen=True)
class PlannedPasses:
    """`device`: of the `mesh`; `names`: of the model's parameters and buffers: other buffers of a
    form are constants. `same_passes`: whether the first passes have the operators that the plan was
    made for, or may end in another loss; `recomputed_nodes`: of the graph.
    """

    stage: int
    device: int
    mesh: LinkedMesh
    names: Set[str]
    requests: Requests
    flops_per_second: float | None
    operators: Sequence[NodeStrategies]
    same_passes: bool
    recomputed_nodes: Sequence[str]

    @staticmethod
    def of(
        plan: Plan, stage: int, device: int, names: Set[str], same_passes: bool = True
    ) -> PlannedPasses:
        planned = plan.stages[stage]
        assert planned.mesh is not None
        texts = planned.placements
        return PlannedPasses(
            stage,
            device,
            LinkedMesh.of(planned.mesh, planned.teams[0].ranks, plan.cluster),
            names,
            Requests() if texts is None else texts.requests(len(planned.mesh)),
            None if texts is None else texts.flops_per_second,
            () if texts is None else texts.operators,
            same_passes,
            planned.recomputed_nodes,
        )

    def assignment(
        self,
        joint: Joint,
        inputs: Sequence[str],
        outputs: Sequence[str],
        crossings: Crossings,
        placed: Mapping[str, Placements] | None = None,
    ) -> Assignment:
        """Divides passes for values of these names. `placed`: how the first passes placed the
        parameters and buffers, if these are others. Raises UserError for placements that cannot be
        met.
        """
        graph = describe(joint)
        try:
            seconds = estimated_seconds(graph, self.flops_per_second)
            leaving = self.leaving(outputs, crossings)
            ends = self._boundary_placements(inputs, joint.differentiable, leaving, crossings)
            planned = self._planned(graph, joint, placed is None) if self.operators else {}
            requests = self._requests(graph, ends, placed)
            return propagate(graph, self.mesh, requests, seconds, planned)
        except UserError as error:
            raise UserError(f"stage {self.stage}: placements.{error.format_message()}") from error

    def leaving(self, outputs: Sequence[str], crossings: Crossings) -> dict[str, Placements]:
        """Returns how outputs are placed, by number; those that cross to no stage are whole."""
        return {
            str(number): crossings.sent.get(name, self.everywhere)
            for number, name in enumerate(outputs)
        }

    @cached_property
    def everywhere(self) -> Placements:
        return (Replicate(),) * len(self.mesh.sizes)

    def _planned(
        self, graph: OperatorGraph, joint: Joint, first: bool
    ) -> dict[str, tuple[Strategy, ...]]:
        """Returns what the plan says of the operators. Raises UserError where that is impossible in
        the first passes; in others, which have other sizes, the rest says what follows. So it does
        of nodes that make other calls here than in the whole model.
        """
        sizes = self.mesh.sizes
        nodes = node_of_calls(graph, joint)
        possible = {}
        for call, said, chosen in followed_calls(self.operators, graph, nodes, sizes):
            if chosen is not None:
                self._try(call.operator, chosen)
                possible[call.name] = chosen
            elif first and self.same_passes and said.sure:
                raise UserError(
                    f"operators: {call.operator.target} of shapes"
                    f" {', '.join(str(list(each.shape)) for each in call.operator.inputs)} cannot"
                    " be divided as the plan says: make the plan again, from a new profile"
                )
        return possible

    def _try(self, operator: Operator, chosen: tuple[Strategy, ...]) -> None:
        """Raises UserError if an operator that no rule knows, run whole and in parts, is not
        divided so. Its code may have changed since it was profiled.
        """
        if operator.family in RULES or chosen == (replicated(operator),) * len(chosen):
            return
        if not can_be_divided(operator, chosen, self.mesh.sizes):
            raise UserError(
                f"operators: {operator.target} gives something else in parts, as the plan divides"
                " it, than whole: profile the model again"
            )

    def _boundary_placements(
        self,
        inputs: Sequence[str],
        differentiable: Sequence[int],
        leaving: Mapping[str, Placements],
        crossings: Crossings,
    ) -> dict[str, Placements]:
        """Returns how inputs and gradients of outputs are placed."""
        requested = self.requests.values
        of_inputs = {
            key: crossings.received.get(name, requested.get(key, self.everywhere))
            for key, name in ((f"input {number}", name) for number, name in enumerate(inputs))
        }
        tangents = {f"tangent {k}": leaving[str(number)] for k, number in enumerate(differentiable)}
        return of_inputs | tangents

    def _requests(
        self,
        graph: OperatorGraph,
        ends: Mapping[str, Placements],
        placed: Mapping[str, Placements] | None,
    ) -> Requests:
        """Once some passes have been described, parameters stay where they are. What crosses from
        or to another stage comes as `ends` say, which know what the plan wants.
        """
        values = {**self.requests.values, **ends}
        if placed is None:
            return Requests(self.requests.parameters, values)
        known = {*ends, *graph.types()}  # other forms may have other values inside
        return Requests(placed, {name: p for name, p in values.items() if name in known})
