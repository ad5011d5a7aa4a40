"""A model as it is at one time, divided into the stages of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from torch import Tensor
from torch.nn import Parameter

from pipedream.capture.captured import Captured
from pipedream.capture.checks.equivalence import as_double
from pipedream.comm.teams import Axes
from pipedream.graph.choices import ScheduleName
from pipedream.runtime.loop.gathering import of_all_ranks
from pipedream.runtime.stages.partition import holds_first, interfaces, links, tied
from pipedream.runtime.stages.sharded_stage import ShardedStage
from pipedream.runtime.stages.stage_forms import Call, CapturedStages, StageForms
from pipedream.runtime.stages.stage_forms import Kind as CallKind
from pipedream.schedule.action import Kind, Worker
from pipedream.schedule.spec import PipelineSpec


@dataclass(eq=False)
class StagedModel:
    """The model in one state. `forms`: this rank's stages, of which at least one form is there.
    Their parameters and buffers are those of the model, of which stages on meshes take parts.
    `passed`: the kinds of calls whose passes were done before; `seen`: the kinds of passes that the
    engine has done.
    """

    forms: CapturedStages
    schedule: ScheduleName
    microbatches: int
    passed: set[CallKind] = field(default_factory=set)
    seen: set[tuple[int, Kind]] = field(default_factory=set)

    @property
    def captured(self) -> Captured:
        captured = self.forms.first
        assert captured is not None, "a minibatch is to come first"
        return captured

    @cached_property
    def tied(self) -> Mapping[str, Sequence[int]]:
        """The parameters that several stages hold."""
        return tied(self.captured, interfaces(self.captured, self.forms.plan))

    @cached_property
    def spec(self) -> PipelineSpec:
        plan = self.forms.plan
        return PipelineSpec(
            self.schedule,
            plan.replicas,
            links(interfaces(self.captured, plan)),
            self.microbatches,
            max_in_flight=plan.max_in_flight if plan.schedule == self.schedule else None,
            tied=tuple(sorted({stage for stages in self.tied.values() for stage in stages})),
        )

    def forms_of(self, stage: int, calls: Sequence[Call]) -> StageForms:
        """Returns a stage for the microbatches of a minibatch, which were captured before."""
        return StageForms.of_each([self.forms.of(call)[stage] for call in calls])

    def parameters(self, stage: int) -> dict[str, Parameter]:
        """Returns those of one stage, by their names in the model."""
        if (divided := self.forms.divided.get(stage)) is not None:
            return dict(divided.parameters)
        return dict(self.forms.originals[stage].piece.module.named_parameters())

    def buffers(self, stage: int) -> dict[str, Tensor]:
        """Returns those of the model, without the constants of a capture."""
        if (divided := self.forms.divided.get(stage)) is not None:
            return dict(divided.buffers)
        names = {name for name, _ in self.forms.model.named_buffers()}
        buffers = self.forms.originals[stage].piece.module.named_buffers()
        return {name: buffer for name, buffer in buffers if name in names}

    def taken_parameters(self, stage: int) -> dict[str, Parameter]:
        """Returns what passes of the stage have of its parameters, as these are now; of its buffers
        the stage has the same part then.
        """
        divided = self.forms.divided.get(stage)
        return self.parameters(stage) if divided is None else divided.take_parts()

    def taken_tensors(self, stage: int) -> dict[str, Tensor]:
        """Returns what passes of the stage have of its parameters and buffers."""
        divided = self.forms.divided.get(stage)
        buffers = self.buffers(stage) if divided is None else divided.buffer_parts()
        return {**self.taken_parameters(stage), **buffers}

    def bring_back(self) -> None:
        """Gathers what passes have written to buffers."""
        for divided in self.forms.divided.values():
            divided.bring_back()

    def whole_gradients(self, stage: int, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns those of whole parameters. Called by all devices of a mesh."""
        divided = self.forms.divided.get(stage)
        return gradients if divided is None else divided.joined(gradients)

    def sharding(self, stage: int) -> ShardedStage | None:
        """Returns how the stage is divided, if it is on a mesh."""
        divided = self.forms.divided.get(stage)
        return None if divided is None else divided.sharding

    @cached_property
    def partial(self) -> Mapping[int, tuple[Axes, ...]]:
        """By stage on a mesh the axes over which gradients are to be added up, of all ranks, which
        all call this.
        """
        if all(stage.mesh is None for stage in self.forms.plan.stages):
            return {}
        own = {s: sorted({*d.sharding.partial.values()}) for s, d in self.forms.divided.items()}
        of_ranks = (each.items() for each in of_all_ranks(own))
        return {stage: tuple(axes) for stage, axes in sorted(chain.from_iterable(of_ranks))}

    @property
    def counts(self) -> bool:
        """Tells whether this rank counts in sums over ranks: of equal devices the first does."""
        return self.forms.mesh_device == 0

    def clip_gradients(
        self,
        workers: Sequence[Worker],
        max_norm: float,
        total: Callable[[list[Tensor]], Tensor],
    ) -> Tensor:
        """Scales the gradients of this rank's `workers` as torch.nn.utils.clip_grad_norm_ does
        those of the whole model; returns what the norm was. `total` adds up values of all ranks.
        """
        gradients = [
            (parameter.grad, self.counts and replica == 0 and holds_first(name, stage, self.tied))
            for stage, replica in workers
            for name, parameter in self.parameters(stage).items()
            if parameter.grad is not None
        ]
        norm = total([as_double(own).square().sum() for own, counts in gradients if counts]).sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient, _ in gradients:
            gradient.mul_(factor)
        return norm

    def tensors(self, stage: int) -> dict[str, Tensor]:
        """Returns the parameters and buffers of one stage."""
        return {**self.parameters(stage), **self.buffers(stage)}
