"""A model that learns from late gradients, in one process: the versions of each stage in a list.

What pd-train computes, without a pipeline: minibatch b runs through all stages as one graph, each
on the version of its weights that the schedule says (`Schedule.delays`), and its gradients make the
next version of each. Optimizers, corrections and the learning rate are pd-train's own. So 32 stages
run on one core, and what it finds is what pd-train finds; `real.py` compares them.

To divide an update into microbatches changes no mean gradient, but how that is rounded: their
gradients are added up in order, as pd-train does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from methods import CONFIGS
from torch import Tensor, nn
from torch.func import functional_call

from pipedream.capture.export import capture
from pipedream.capture.loss import load_loss
from pipedream.capture.programs.parameter_roles import roles
from pipedream.capture.sources.load import load_config_model, load_data
from pipedream.graph.choices import ScheduleName
from pipedream.graph.run_config import MUON, RunConfig
from pipedream.runtime.data.reader import Epoch
from pipedream.runtime.optim.error_feedback import ErrorFeedback
from pipedream.runtime.optim.late_gradients import (
    optimizer_form,
    rate_factor,
    scale_rate,
    turns_every,
)
from pipedream.runtime.optim.muon import with_others
from pipedream.runtime.optim.optimizers import make_optimizer
from pipedream.runtime.optim.rates import LearningRate
from pipedream.runtime.optim.stepping import Norm, StageStepping
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec

CPU = torch.device("cpu")
LEAST = math.log(256) + 1
"""A loss in nats a byte that says that nothing is learned, nor ever will be."""


@dataclass(eq=False)
class LateStage:
    """A stage: `versions[-1]` are its weights of now, as copies; older ones as long as a minibatch
    may run on them. `delays`, `makes_good`: of the schedule of an epoch.
    """

    parameters: Mapping[str, nn.Parameter]
    stepping: StageStepping
    delays: Mapping[int, int]
    makes_good: Mapping[int, int]
    predicts: bool = False
    feedback: ErrorFeedback | None = None
    updates: int = 0
    versions: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def delay(self) -> int:
        return max(self.delays.values())

    def begin_epoch(self) -> None:
        """The pipeline is drained: all run on the newest version, and the last step is known."""
        self.versions = self.versions[-2:] or [_copies(self.parameters)]
        if self.feedback is not None:
            self.feedback.begin()
            self.feedback.follow({a + 1: b + 1 for a, b in self.makes_good.items()})

    def weights(self, minibatch: int) -> dict[str, Tensor]:
        """Returns the weights that a minibatch of the epoch runs on, as leaves."""
        delay = self.delays[minibatch]
        weights = self.versions[-1 - delay]
        if self.predicts and delay and len(self.versions) > delay + 1:
            before = self.versions[-2 - delay]
            weights = {
                name: torch.add(each, each - before[name], alpha=delay).detach()
                for name, each in weights.items()
            }
        return {name: each.requires_grad_() for name, each in weights.items()}

    def squares(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Returns the sum of the squares of its gradients."""
        total = torch.zeros(1, dtype=torch.float64)
        self.stepping.add_squares(gradients, total)
        return total

    def update(self, number: int, gradients: Mapping[str, Tensor], norm: Tensor) -> None:
        """Makes the next version by update `number` of the epoch. `norm`: of the gradients that are
        clipped together.
        """
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]
        if self.feedback is not None:
            now = self.versions[-1]
            stood = {each: now[name].detach() for name, each in self.parameters.items()}
            self.feedback.expect(number + 1, stood)
        self.stepping.step(gradients, Norm(norm), 1)
        self.updates += 1
        self.versions = [*self.versions[-self.delay - 2 :], _copies(self.parameters)]


class LateModel:
    """A model of `topics_gpt` with one block for each stage, learning as a config says."""

    def __init__(self, config: RunConfig, schedule: ScheduleName, stages: int) -> None:
        self.config = config
        self.model = load_config_model(config, CONFIGS)
        self.loss = load_loss(config.loss, CONFIGS)
        self.training, self.held_out = load_data(config, CONFIGS)
        minibatches = len(Epoch(self.training, config, 1, CPU))
        self.updates = minibatches // config.microbatches
        links = tuple((stage, stage + 1) for stage in range(stages - 1))
        spec = PipelineSpec(schedule, (1,) * stages, links, config.microbatches, 1)
        planned = Schedule(spec, minibatches)
        self.together = planned.policy.uniform_updates
        names = [name for name, _ in self.model.named_parameters()]
        self.form = optimizer_form(config.optimizer, config.asynchronous)
        if self.form.name == MUON:
            inputs = Epoch(self.training, config, 1, CPU).batch(0).inputs
            self.form = with_others(self.form, roles(capture(self.model, inputs)))
        self.stages = [self._stage(planned, stage, stages, names) for stage in range(stages)]
        rotation = config.asynchronous.basis_rotation
        if rotation is not None:
            greatest = max(stage.delay for stage in self.stages)
            for stage in self.stages:
                for group in stage.stepping.optimizer.param_groups:
                    group["every"] = turns_every(rotation.every, stage.delay, greatest)

    def _stage(self, planned: Schedule, stage: int, stages: int, names: Sequence[str]) -> LateStage:
        config, wanted = self.config, self.config.asynchronous
        own = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if stage_of(name, stages) == stage
        }
        optimizer = make_optimizer(self.form, own, names)
        rate = LearningRate(config.scheduler, optimizer, CONFIGS)
        made = LateStage(
            own,
            StageStepping(optimizer, own, config, rate, own.keys()),
            planned.delays(stage),
            planned.makes_good(stage),
        )
        made.predicts = wanted.weight_prediction
        scale_rate(optimizer, lambda: rate_factor(config, made.delay, made.updates))
        if wanted.error_feedback and made.delay:
            made.feedback = ErrorFeedback(optimizer, float(wanted.error_feedback))
        return made

    def train(self) -> list[float]:
        """Returns the loss of each update, up to one that shows that the run has failed."""
        losses: list[float] = []
        for number in range(1, self.config.epochs + 1):
            epoch = Epoch(self.training, self.config, number, CPU)
            for stage in self.stages:
                stage.begin_epoch()
            for update in range(self.updates):
                losses.append(self.learn(update, epoch))
                if not losses[-1] < 2 * LEAST:
                    return losses
        return losses

    def learn(self, update: int, epoch: Epoch) -> float:
        """Makes an update of the epoch. Returns its loss."""
        count, losses = self.config.microbatches, list[float]()
        found: dict[str, Tensor] = {}
        for minibatch in range(update * count, (update + 1) * count):
            batch = epoch.batch(minibatch)
            each = (stage.weights(minibatch) for stage in self.stages)
            weights = {name: tensor for own in each for name, tensor in own.items()}
            loss = self.loss(functional_call(self.model, weights, batch.inputs), batch.target)
            losses.append(loss.item())
            own = torch.autograd.grad(loss, list(weights.values()))
            found = {
                name: found[name].add_(gradient) if name in found else gradient
                for name, gradient in zip(weights, own, strict=True)
            }
        if count > 1:
            torch._foreach_div_(list(found.values()), count)
        gradients = [{name: found[name] for name in stage.parameters} for stage in self.stages]
        squares = [stage.squares(own) for stage, own in zip(self.stages, gradients, strict=True)]
        if self.together:
            squares = [sum(squares[1:], squares[0])] * len(squares)
        for stage, own_gradients, norm in zip(self.stages, gradients, squares, strict=True):
            stage.update(update, own_gradients, norm.sqrt())
        return fmean(losses)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the mean loss of the held-out windows, nats a byte."""
        assert self.held_out is not None
        windows = [self.held_out[index] for index in range(len(self.held_out))]
        losses = [
            self.loss(self.model(inputs), target).item() * len(inputs)
            for inputs, target in torch.utils.data.DataLoader(windows, batch_size=128)
        ]
        return sum(losses) / len(windows)


def stage_of(name: str, stages: int) -> int:
    """A block for each stage; what comes before them in the first, what comes after in the last."""
    if name.startswith("blocks."):
        return int(name.split(".")[1])
    return 0 if name.startswith(("embed", "position")) else stages - 1


def _copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
