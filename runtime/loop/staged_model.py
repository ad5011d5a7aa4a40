"""A model as it is at one time, divided into the stages of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor
from torch.nn import Parameter

from pipedream.capture.captured import Captured
from pipedream.capture.checks.equivalence import as_double
from pipedream.graph.choices import ScheduleName
from pipedream.runtime.stages.partition import holds_first, interfaces, links, tied
from pipedream.runtime.stages.stage_forms import Call, CapturedStages, StageForms
from pipedream.runtime.stages.stage_forms import Kind as CallKind
from pipedream.schedule.action import Kind, Worker
from pipedream.schedule.spec import PipelineSpec


@dataclass(eq=False)
class StagedModel:
    """The model in one state. `forms`: this rank's stages, of which at least one form is there.
    Their parameters and buffers are those of the model. `passed`: the kinds of calls whose passes
    were done before; `seen`: the kinds of passes that the engine has done.
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
        return dict(self.forms.originals[stage].piece.module.named_parameters())

    def buffers(self, stage: int) -> dict[str, Tensor]:
        """Returns those of the model, without the constants of a capture."""
        names = {name for name, _ in self.forms.model.named_buffers()}
        buffers = self.forms.originals[stage].piece.module.named_buffers()
        return {name: buffer for name, buffer in buffers if name in names}

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
            (parameter.grad, replica == 0 and holds_first(name, stage, self.tied))
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
