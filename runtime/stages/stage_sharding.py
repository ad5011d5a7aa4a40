"""One device's part of a stage whose operators the devices of a mesh share.

The plan places some parameters; the operators of the stage's own passes say what follows for the
rest. Every form of the stage (a smaller last minibatch, evaluation) has operators of its own, and
the same parameters in the same placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property

from torch import Tensor, nn
from torch.nn import Parameter

from pipedream.capture.programs.attribution import node_of_calls
from pipedream.capture.programs.description import describe
from pipedream.capture.programs.divisible import divisible
from pipedream.capture.programs.joint import Joint
from pipedream.capture.programs.localize import BoundaryPlacements, localize
from pipedream.capture.programs.trial import can_be_divided
from pipedream.comm.redistribute import extract
from pipedream.comm.teams import TeamGroups
from pipedream.comm.tied_sums import GradientPart
from pipedream.graph.errors import UserError
from pipedream.graph.placements.operators import (
    Operator,
    OperatorGraph,
    TensorType,
    estimated_seconds,
)
from pipedream.graph.placements.placement import Partial, Placements, Replicate
from pipedream.graph.placements.regions import Region, held_region, whole
from pipedream.graph.placements.requests import Requests
from pipedream.graph.plan import Plan
from pipedream.runtime.stages.crossings import Crossings
from pipedream.sharding.assignment import Assignment, LinkedMesh, output_target, steps_between
from pipedream.sharding.planned import follow, planned_calls
from pipedream.sharding.propagate import propagate
from pipedream.sharding.rules import RULES
from pipedream.sharding.rules.strategy import Strategy, replicated
from pipedream.sharding.steps import Step


class StageSharding:
    """Divides a stage. `placed`: how the mesh holds each parameter and buffer of the model that the
    stage has, and `shapes` of the whole ones, known once the stage's passes are `described`.
    `partial`: by name of a parameter the axes over which its gradient is to be added up. `groups`:
    once the ranks have met. `names`: of the model's parameters and buffers; other buffers of a form
    are constants.
    """

    def __init__(
        self, plan: Plan, stage: int, device: int, names: Set[str], same_passes: bool = True
    ) -> None:
        """`same_passes`: whether the first passes have the operators that the plan was made for, or
        may end in another loss.
        """
        planned = plan.stages[stage]
        assert planned.mesh is not None
        self.stage, self.device, self.names = stage, device, names
        self.mesh = LinkedMesh.of(planned.mesh, planned.teams[0].ranks, plan.cluster)
        texts = planned.placements
        self.requests = Requests() if texts is None else texts.requests(len(planned.mesh))
        self.flops_per_second = None if texts is None else texts.flops_per_second
        self.operators = () if texts is None else texts.operators
        self.same_passes = same_passes
        self.placed: dict[str, Placements] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.partial: dict[str, tuple[int, ...]] = {}
        self.groups: TeamGroups | None = None

    def localized(
        self,
        joint: Joint,
        inputs: Sequence[str],
        outputs: Sequence[str],
        crossings: Crossings,
    ) -> tuple[Joint, Assignment]:
        """Returns the passes of this device, for values of these names. Raises UserError for
        placements that cannot be met.
        """
        leaving = {
            str(number): crossings.sent.get(name, self.everywhere)  # else it crosses to no stage
            for number, name in enumerate(outputs)
        }
        summed = divisible(joint)
        graph = describe(summed)
        try:
            seconds = estimated_seconds(graph, self.flops_per_second)
            ends = self._boundary_placements(inputs, joint.differentiable, leaving, crossings)
            planned = self._planned(graph, summed) if self.operators else {}
            requests = self._requests(graph, ends)
            assignment = propagate(graph, self.mesh, requests, seconds, planned)
        except UserError as error:
            raise UserError(f"stage {self.stage}: placements.{error.format_message()}") from error
        boundary = BoundaryPlacements(
            whole_inputs={
                str(number) for number, name in enumerate(inputs) if name not in crossings.received
            },
            outputs=leaving,
            gradients=self._gradients(),
        )
        return localize(summed, assignment, self.device, self._move, boundary), assignment

    def _planned(self, graph: OperatorGraph, joint: Joint) -> dict[str, tuple[Strategy, ...]]:
        """Returns what the plan says of the operators. Raises UserError where that is impossible in
        the first passes; in others, which have other sizes, the rest says what follows. So it does
        of nodes that make other calls here than in the whole model.
        """
        sizes = self.mesh.sizes
        nodes = node_of_calls(graph, joint)
        planned, possible = planned_calls(self.operators, graph, nodes, len(sizes)), {}
        for call in graph.calls:
            if call.name not in planned:
                continue
            chosen = follow(call.operator, planned[call.name].placements, sizes)
            if chosen is not None:
                self._try(call.operator, chosen)
                possible[call.name] = chosen
            elif not self.placed and self.same_passes and planned[call.name].sure:
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

    def _gradients(self) -> dict[str, Placements]:
        """Returns how all forms give the gradients of parameters, to add them up: as the first."""
        return {
            name: tuple(
                Partial() if axis in axes else own for axis, own in enumerate(self.placed[name])
            )
            for name, axes in self.partial.items()
        }

    @cached_property
    def everywhere(self) -> Placements:
        return (Replicate(),) * len(self.mesh.sizes)

    def _requests(self, graph: OperatorGraph, ends: Mapping[str, Placements]) -> Requests:
        """Once some passes have been described, parameters stay where they are. What crosses from
        or to another stage comes as `ends` say, which know what the plan wants.
        """
        values = {**self.requests.values, **ends}
        if not self.placed:
            return Requests(self.requests.parameters, values)
        known = {*ends, *graph.types()}  # other forms may have other values inside
        return Requests(self.placed, {name: p for name, p in values.items() if name in known})

    def adopt(self, assignment: Assignment) -> None:
        """Places parameters and buffers of the model as these first passes do."""
        for each in assignment.graph.inputs:
            if each.role in ("parameter", "buffer") and each.name in self.names:  # frozen ones too
                self.placed[each.name] = assignment.placed[each.value]
                self.shapes[each.name] = each.type.shape
        for output in assignment.graph.outputs:
            if output.role == "parameter gradient":
                placements = assignment.placed[output.value]
                target = output_target(output, placements, assignment.placed_inputs)
                axes = (axis for axis, own in enumerate(target) if own == Partial())
                self.partial[output.name] = tuple(axes)

    def local_part(self, name: str, tensor: Tensor) -> Tensor:
        """This device's part of a parameter, a buffer, or what an optimizer remembers of one, in
        memory of its own.
        """
        shape = tuple(tensor.shape)
        region = self.region(name, shape)
        return tensor if region is None else extract(tensor, whole(shape), region).clone()

    def joined(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the whole of it. Called by all devices of the mesh, for the same tensors."""
        if not self.is_divided(name):
            return tensor
        shape, placements = self.shapes[name], self.placed[name]
        if tensor.shape != self._region(shape, placements).shape:
            return tensor
        type_ = TensorType(
            shape=shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            element_bytes=tensor.element_size(),
        )
        steps = steps_between(type_, self.mesh, placements, self.everywhere)
        return self._move(tensor.detach(), shape, steps)

    def gathered(self, name: str, tensor: Tensor) -> Tensor | None:
        """As `joined`, in memory of its own on the CPU of the first device alone: the others keep
        nothing.
        """
        joined = self.joined(name, tensor)
        if self.device != 0:
            return None
        on_cpu = joined.detach().cpu()
        shared = on_cpu.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        return (on_cpu.clone() if shared else on_cpu).contiguous()

    def is_divided(self, name: str) -> bool:
        return any(each != Replicate() for each in self.placed.get(name, ()))

    def counts(self, name: str) -> bool:
        """Returns whether this device counts its part in a norm: of equal ones the first does."""
        return self._part(name, self.placed[name]).counts

    def gradient_part(self, name: str) -> GradientPart:
        """Returns what it has of the gradient of a parameter before that is added up."""
        return self._part(name, self._gradients().get(name, self.placed[name]))

    def _part(self, name: str, placements: Placements) -> GradientPart:
        return GradientPart.of(self.shapes[name], self.mesh.sizes, placements, self.device)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of the whole of what is divided, else None."""
        return self.shapes[name] if self.is_divided(name) else None

    def divide(self, module: nn.Module) -> None:
        """Replaces what is divided of a module's parameters and buffers by this device's parts."""
        local = {
            name: Parameter(self.local_part(name, tensor.detach()), tensor.requires_grad)
            if isinstance(tensor, Parameter)
            else self.local_part(name, tensor)
            for name, tensor in _tensors(module)
            if self.is_divided(name)
        }
        _replace(module, local)

    def follow(self, module: nn.Module, divided: nn.Module) -> None:
        """Gives another form of the stage the parts of one that is divided."""
        _replace(module, {n: each for n, each in _tensors(divided) if self.is_divided(n)})

    def constants(self, assignment: Assignment, module: nn.Module) -> dict[str, Tensor]:
        """This device's parts of the buffers of a module that the model does not have."""
        parts = {}
        for name, buffer in module.named_buffers():
            if name not in self.placed:
                everything = whole(tuple(buffer.shape))
                region = self._region(everything.shape, assignment.placed_inputs["buffer", name])
                if region != everything:
                    parts[name] = extract(buffer, everything, region).clone()
        return parts

    def region(self, name: str, shape: tuple[int, ...]) -> Region | None:
        """Returns what this device holds of a tensor that goes with a parameter, if not all."""
        if not self.is_divided(name) or shape != self.shapes[name]:
            return None
        return self._region(shape, self.placed[name])

    def _region(self, shape: tuple[int, ...], placements: Placements) -> Region:
        return held_region(shape, self.mesh.sizes, placements, self.device)

    def _move(self, local: Tensor, shape: tuple[int, ...], steps: Sequence[Step]) -> Tensor:
        assert self.groups is not None, "the ranks have not met"
        return self.groups.mesh.redistribute(local, shape, steps)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _replace(module: nn.Module, local: Mapping[str, Tensor]) -> None:
    """Puts these in the place of tensors of the module, under each of their names."""
    by_id = {id(old): local[name] for name, old in _tensors(module) if name in local}
    for part in module.modules():
        own = (
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *part.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, tensor in own:
            if id(tensor) in by_id:
                setattr(part, name, by_id[id(tensor)])
