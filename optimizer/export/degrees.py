"""What the devices of a plan's meshes are to frameworks that know degrees of parallelism alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from pipedream.graph.errors import UserError
from pipedream.graph.placements.placement import Replicate, parse_placements
from pipedream.graph.plan import Plan, Stage


@dataclass(frozen=True)
class Degrees:
    """`tensor`: the devices that divide parameters; `data`: those that divide a batch, replicas
    among them, None if stages have several numbers of replicas.
    """

    pipeline: int
    tensor: int
    data: int | None

    @property
    def processes(self) -> int | None:
        return None if self.data is None else self.pipeline * self.tensor * self.data


def degrees(plan: Plan, pipeline: int) -> Degrees | None:
    """Those of a plan of so many stages; None if none is on a mesh.

    An axis on which all parameters are whole is data parallel, any other tensor parallel. Raises
    UserError if stages have different meshes, which no framework can express.
    """
    meshes = {stage.mesh for stage in plan.stages}
    if meshes == {None}:
        return None
    if len(meshes) > 1:
        texts = ", ".join(" x ".join(map(str, mesh or (1,))) for mesh in meshes)
        raise UserError(
            f"it divides all stages alike, and those of the plan are on meshes of {texts} devices:"
            " plan with --mesh, for one mesh, or --intra-op none, or export to torch"
        )
    (mesh,) = meshes
    assert mesh is not None
    dividing = dividing_axes(plan.stages)
    tensor = prod(size for axis, size in enumerate(mesh) if axis in dividing)
    data = prod(mesh) // tensor
    replicas = set(plan.replicas)
    return Degrees(pipeline, tensor, data * replicas.pop() if len(replicas) == 1 else None)


def dividing_axes(stages: Sequence[Stage]) -> frozenset[int]:
    """The axes on which some parameter of the stages is divided."""
    return frozenset(axis for stage in stages for axis in _dividing(stage))


def _dividing(stage: Stage) -> Iterator[int]:
    texts = {} if stage.placements is None else stage.placements.parameters
    for text in set(texts.values()):
        for axis, placement in enumerate(parse_placements(text)):
            if placement != Replicate():
                yield axis
