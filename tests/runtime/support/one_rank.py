"""All stages of a small model on one rank, in this process: what they learn in an epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pipelines import BI, BW, B, F, Orders
from plans import cut, make_plan
from torch import Tensor, nn
from training import chain_config

from pipedream.capture.captured import Captured
from pipedream.capture.compute_settings import Precision
from pipedream.capture.export import capture
from pipedream.comm.stage_groups import StageGroups
from pipedream.comm.transport import Transport
from pipedream.graph.run_config import OptimizerConfig
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.engine.executor import Executor
from pipedream.runtime.engine.forward import Minibatches
from pipedream.runtime.engine.offload import OffloadedActivations
from pipedream.runtime.optim.optimizers import make_optimizer
from pipedream.runtime.optim.rates import LearningRate, LossSum
from pipedream.runtime.optim.stepping import StageStepping, Stepping
from pipedream.runtime.optim.weights import Weights
from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.run.training_segment import TrainingSegment
from pipedream.runtime.stages.partition import interfaces, links
from pipedream.runtime.stages.randomness import MinibatchRng
from pipedream.runtime.stages.stage_forms import CapturedStages, StageForms
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.schedule.action import Action
from pipedream.schedule.generate import Step
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec

CPU = torch.device("cpu")
ROUND = 3
"""Minibatches of an update."""
OPTIMIZER = OptimizerConfig(name="SGD", args={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})

Which = Callable[[int, int], bool]
"""Whether the backward pass of (stage, minibatch) is in halves."""


def all_halved(stage: int, minibatch: int) -> bool:
    return True


def none_halved(stage: int, minibatch: int) -> bool:
    return False


@dataclass(frozen=True)
class Data:
    """Minibatches of one shape."""

    batches: Sequence[Batch]

    def inputs(self, minibatch: int, which: Collection[int]) -> list[Tensor]:
        return [self.batches[minibatch].inputs[position] for position in which]

    def peek(self, minibatch: int) -> Batch:
        return self.batches[minibatch]

    def target(self, minibatch: int) -> Any:
        return self.batches[minibatch].target


@dataclass
class OneRank:
    """A rank with the `stages` of a model, cut in pieces of about as many nodes.

    `offload`: whether what they save is copied to the host.
    `before` and `after` are called with each action. `varying`: minibatches differ in shape, and
    the stages have as many forms. `group`: of replicas that add up their gradients. `again`: nodes
    that are recomputed, of those of the model.
    """

    model: nn.Module
    data: Data
    stages: int = 2
    loss: Callable[[Any, Any], Tensor] = nn.functional.mse_loss
    halved: Which = all_halved
    recompute: bool = False
    again: Callable[[Captured], Collection[str]] = lambda captured: ()
    offload: bool = False
    autocast: str | None = None
    backend: str | None = None
    scale: float = 1.0
    clip_norm: float | None = None
    varying: bool = False
    group: Any = None
    device: torch.device = CPU
    transport: Transport | None = None
    after: Callable[[Action], None] = lambda action: None
    before: Callable[[Action], None] = lambda action: None
    losses: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.messages = self.transport or Transport(self.device, "gloo")
        self.precision = Precision(self.autocast, self.device)
        captured = capture(self.model, self.data.batches[0].inputs, precision=self.precision)
        ones = (1,) * self.stages
        nodes = cut(captured.graph, self.stages)
        plan = make_plan(captured.graph, nodes, ones, again=self.again(captured))
        spec = PipelineSpec(
            "flush",
            ones,
            links(interfaces(captured, plan)),
            ROUND,
            max_in_flight=(max(self.stages, ROUND),) * self.stages,
            tied=tuple(range(self.stages)) if self.group else (),
        )
        self.schedule = Schedule(spec, len(self.data.batches))
        ranks = [[0]] * self.stages
        self.orders = Orders.of(self.schedule, ranks, lambda _: self._passes())
        self.rng, settings = MinibatchRng(5, self.device), (self.precision, True, self.backend)
        self.forms = CapturedStages(self.model, plan, range(self.stages), self.rng, *settings)
        self.executors = {
            stage: self._executor(
                stage,
                StageModule.of(captured, plan, stage, self.rng, self.backend),
            )
            for stage in range(self.stages)
        }

    def _passes(self) -> Iterator[tuple[tuple[int, int], Step]]:
        """All forward passes of a round; then the backward passes, second halves at the end."""
        for number, first in enumerate(range(0, len(self.data.batches), ROUND)):
            minibatches = range(first, min(first + ROUND, len(self.data.batches)))
            upwards = [(stage, b) for b in minibatches for stage in range(self.stages)]
            downwards = [(stage, b) for b in minibatches for stage in reversed(range(self.stages))]
            kinds = [(F, *each) for each in upwards]
            kinds += [(BI if self.halved(*each) else B, *each) for each in downwards]
            kinds += [(BW, *each) for each in downwards if self.halved(*each)]
            for kind, stage, b in kinds:
                yield (stage, 0), Step(0, kind, b, number)

    def _executor(self, stage: int, stage_module: StageModule) -> Executor:
        parameters = dict(stage_module.piece.module.named_parameters())
        changes = {"loss_scale": self.scale, "clip_norm": self.clip_norm}
        config = chain_config(OPTIMIZER).model_copy(update=changes)
        optimizer = make_optimizer(OPTIMIZER, parameters)
        rate = LearningRate(None, optimizer, Path())
        steps = StageStepping(optimizer, parameters, config, rate, parameters)
        return Executor(
            stage_modules=self._choice(stage, stage_module),
            weights=Weights(parameters),
            stepping=Stepping({stage: steps}, config, LossSum(lambda _: None, self.device), None),
            transport=self.messages,
            groups=StageGroups(self.group),
            assignment=self.orders.assignment,
            loss=self._loss,
            on_loss=lambda b, loss: self.losses.__setitem__(b, loss.item()),
            rng=self.rng,
            recompute=self.recompute and stage < self.stages - 1,
            offload=OffloadedActivations(self.device) if self.offload else None,
        )

    def _choice(self, stage: int, stage_module: StageModule) -> StageForms:
        if not self.varying:
            return StageForms(stage_module)
        self.forms.originals[stage] = stage_module
        return StageForms(stage_module, captured=self.forms)

    def _loss(self, output: Any, target: Any) -> Tensor:
        with self.precision.computing():
            return self.loss(output, target)

    def train(self, data: Minibatches | None = None) -> OneRank:
        """One epoch, of the same minibatches as `data` has them."""
        engine = Engine(self.executors, self.messages, self.after, self.before)
        segment = TrainingSegment(0, len(self.data.batches))
        engine.run(ActionStream(segment, self.orders.actions[0]), data or self.data)
        return self

    @property
    def modules(self) -> dict[int, StageModule]:
        return {stage: each.stage_modules.of(0) for stage, each in self.executors.items()}

    @property
    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers that the model saves."""
        own = [module.piece.module for module in self.modules.values()]
        named = {n: t for m in own for n, t in (*m.named_parameters(), *m.named_buffers())}
        return {n: named[n].detach() for n in self.model.state_dict() if n in named}

    @property
    def obstacles(self) -> list[str | None]:
        """Of each stage why it does not run as programs; None if it does."""
        programs = [module.program for module in self.modules.values()]
        return [None if each.named is not None else each.obstacle or "unused" for each in programs]


def regression(count: int = 5, examples: int = 4, dtype: torch.dtype = torch.float64) -> Data:
    """Minibatches of [examples, 6] to learn [examples, 6] from."""
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(2, count, examples, 6, generator=generator, dtype=dtype)
    return Data([Batch((a,), b) for a, b in zip(x, y, strict=True)])
