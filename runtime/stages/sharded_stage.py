"""What one device of a mesh has of a stage whose operators the devices share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.nn import Parameter

from pipedream.capture.programs.joint import Joint
from pipedream.capture.programs.localize import BoundaryPlacements, localize
from pipedream.comm.redistribute import extract
from pipedream.comm.teams import TeamGroups
from pipedream.comm.tied_sums import GradientPart
from pipedream.graph.placements.operators import TensorType
from pipedream.graph.placements.placement import Partial, Placements, Replicate
from pipedream.graph.placements.regions import Region, held_region, whole
from pipedream.runtime.stages.crossings import Crossings
from pipedream.runtime.stages.planned_passes import PlannedPasses
from pipedream.sharding.assignment import Assignment, LinkedMesh, output_target, steps_between
from pipedream.sharding.steps import Step


@dataclass(eq=False)
class ShardedStage:
    """`placed`: how the mesh holds each parameter and buffer of the model that the stage has, and
    `shapes` of the whole ones. `partial`: by name of a parameter the axes over which its gradient
    is to be added up. `groups`: once the ranks have met.
    """

    planned: PlannedPasses
    placed: Mapping[str, Placements]
    shapes: Mapping[str, tuple[int, ...]]
    partial: Mapping[str, tuple[int, ...]]
    groups: TeamGroups | None = None

    @staticmethod
    def of(planned: PlannedPasses, first: Assignment) -> ShardedStage:
        """Places parameters and buffers of the model as its first passes do."""
        placed, shapes, partial = {}, {}, {}
        for each in first.graph.inputs:
            if each.role in ("parameter", "buffer") and each.name in planned.names:  # frozen too
                placed[each.name] = first.placed[each.value]
                shapes[each.name] = each.type.shape
        for output in first.graph.outputs:
            if output.role == "parameter gradient":
                target = output_target(output, first.placed[output.value], first.placed_inputs)
                axes = (axis for axis, own in enumerate(target) if own == Partial())
                partial[output.name] = tuple(axes)
        return ShardedStage(planned, placed, shapes, partial)

    @property
    def device(self) -> int:
        """Of the mesh."""
        return self.planned.device

    @property
    def mesh(self) -> LinkedMesh:
        return self.planned.mesh

    def localized(
        self,
        joint: Joint,
        assignment: Assignment,
        inputs: Sequence[str],
        outputs: Sequence[str],
        crossings: Crossings,
    ) -> Joint:
        """Returns the passes of this device, for values of these names."""
        boundary = BoundaryPlacements(
            whole_inputs={
                str(number) for number, name in enumerate(inputs) if name not in crossings.received
            },
            outputs=self.planned.leaving(outputs, crossings),
            gradients=self._gradients,
        )
        return localize(joint, assignment, self.device, self._move, boundary)

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
        steps = steps_between(type_, self.mesh, placements, self.planned.everywhere)
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
        return self._part(name, self._gradients.get(name, self.placed[name]))

    def _part(self, name: str, placements: Placements) -> GradientPart:
        return GradientPart.of(self.shapes[name], self.mesh.sizes, placements, self.device)

    @cached_property
    def _gradients(self) -> dict[str, Placements]:
        """Returns how all forms give the gradients of parameters, to add them up: as the first."""
        return {
            name: tuple(
                Partial() if axis in axes else own for axis, own in enumerate(self.placed[name])
            )
            for name, axes in self.partial.items()
        }

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of the whole of what is divided, else None."""
        return self.shapes[name] if self.is_divided(name) else None

    def take_parts(self, module: nn.Module) -> None:
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
