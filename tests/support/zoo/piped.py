"""What a module learns as a pipeline: all stages on one rank of one process, by the engine.

Each stage has a copy of the model of its own, as it has in a run of several processes.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from order_runs import pieces
from pipelines import BI, BW, B, F, Orders
from plans import make_plan
from schedules import assigned
from torch import Tensor, nn

from pipedream.capture.captured import Captured, flatten_inputs
from pipedream.capture.compute_settings import IN_FULL
from pipedream.capture.export import capture
from pipedream.comm.communicators import Communicators
from pipedream.comm.stage_groups import StageGroups, SummingRanks
from pipedream.comm.transport import Transport
from pipedream.graph.plan import RankAssignment
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.data.order import Sizes
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.engine.evaluation import EvaluationExecutor, EvaluationTotals
from pipedream.runtime.engine.executor import Executor
from pipedream.runtime.optim.gradient_sums import GradientSums
from pipedream.runtime.optim.weights import Weights
from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.run.training_segment import TrainingSegment
from pipedream.runtime.stages.partition import interfaces, links, tied
from pipedream.runtime.stages.randomness import MinibatchRng
from pipedream.runtime.stages.stage_forms import Call, CapturedStages, StageForms
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.schedule.action import Action
from pipedream.schedule.generate import Step
from pipedream.schedule.schedule import Schedule, forwards
from pipedream.schedule.spec import PipelineSpec
from zoo.learned import WHOLE, Learned, Named, optimizer, owned, tensors_of
from zoo.specimens import Inputs, Specimen, loss_of

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Way:
    """A way to train a module as a pipeline of so many `stages`.

    `halves`: backward passes in two halves, by programs; else whole ones, by autograd. `at`: the
    number of nodes of the first of two stages. `backend`: of torch.compile, if it is compiled.
    """

    stages: int = 1
    halves: bool = False
    recompute: bool = False
    sizes: Sequence[Sequence[int]] = WHOLE
    at: int | None = None
    backend: str | None = None

    def cut(self, captured: Captured) -> Sequence[Sequence[str]]:
        graph = captured.graph
        if self.at is None:
            return pieces(graph, self.stages)
        inputs = [name for name in graph.order if graph.nodes[name].is_input]
        working = captured.working
        return [[*inputs, *working[: self.at]], list(working[self.at :])]


@dataclass(frozen=True)
class Microbatches:
    """Those of one update."""

    calls: Sequence[Inputs]

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[Tensor]:
        tensors = flatten_inputs(*owned(self.calls[minibatch]))
        return [tensors[position] for position in which]

    def peek(self, minibatch: int) -> Batch:
        return Batch(tuple(flatten_inputs(*self.calls[minibatch])), None)

    def target(self, minibatch: int) -> Any:
        return None


class Pipelined:
    """A specimen that learns in this way. `first`: as captured for the first microbatch."""

    def __init__(
        self, specimen: Specimen, way: Way, first: Captured, training: bool = True
    ) -> None:
        self.specimen, self.way, self.training = specimen, way, training
        self.learned = Learned()
        self.plan = make_plan(
            first.graph,
            way.cut(first),
            (1,) * way.stages,
            "flush",
            range(way.stages - 1) if way.recompute else (),
        )
        self.assignment = assigned([[0]] * way.stages)
        self.links = links(interfaces(first, self.plan))
        self.tied = tied(first, interfaces(first, self.plan))
        self.rng, self.transport = MinibatchRng(5, CPU), Transport(CPU, "gloo")
        self.forms = [self._forms(stage, first) for stage in range(way.stages)]
        self.given: list[Tensor] = []

    def _forms(self, stage: int, first: Captured) -> CapturedStages:
        model = self.specimen.model()
        how = self.training, self.way.backend, first
        forms = CapturedStages(model, self.plan, [stage], self.rng, IN_FULL, *how)
        call = Call(*self.specimen.call(0, 0, self.way.sizes[0][0]))
        own = _adopted(copy.deepcopy(first), model)
        forms.forms[call.kind] = {stage: forms._form(own, stage)}
        return forms

    def train(self) -> Learned:
        spec = PipelineSpec(
            "flush",
            (1,) * self.way.stages,
            self.links,
            2,
            max_in_flight=(4,) * self.way.stages,
            tied=tuple(sorted({stage for stages in self.tied.values() for stage in stages})),
        )
        groups = _groups(self.assignment, self.tied)
        executors = {stage: self._executor(stage, groups[stage]) for stage in range(len(groups))}
        learning = {s: optimizer(list(e.weights.parameters.values())) for s, e in executors.items()}
        for update, sizes in enumerate(self.way.sizes):
            calls = [self.specimen.call(update, k, size) for k, size in enumerate(sizes)]
            self._update(update, executors, spec, calls)
            for each in learning.values():
                if each is not None:
                    each.step()
                    each.zero_grad()
        self._keep()
        return self.learned

    def _executor(self, stage: int, groups: StageGroups) -> Executor:
        (form,) = (forms[stage] for forms in self.forms[stage].forms.values())
        return Executor(
            stage_modules=StageForms(form),
            transport=self.transport,
            assignment=self.assignment,
            loss=self._loss,
            weights=Weights(dict(form.piece.module.named_parameters())),
            stepping=GradientSums(),
            groups=groups,
            on_loss=lambda minibatch, loss: self.learned.losses.append(loss.item()),
            rng=self.rng,
            recompute=self.plan.stages[stage].recompute,
        )

    def _update(
        self,
        update: int,
        executors: dict[int, Executor],
        spec: PipelineSpec,
        calls: Sequence[Inputs],
    ) -> None:
        self.given, self.rng.epoch, before = [], update + 1, len(self.learned.losses)
        for stage, executor in executors.items():
            forms = [self.forms[stage].of(Call(*each)) for each in calls]
            executor.stage_modules = StageForms.of_each([form[stage] for form in forms])
        orders = Orders.of(
            Schedule(spec, len(calls)), [[0]] * len(executors), lambda _: self._passes(len(calls))
        )
        stream = ActionStream(TrainingSegment(0, len(calls)), orders.actions[0])
        Engine(executors, self.transport).run(stream, Microbatches(calls))
        gradients: Named = {}
        for executor in executors.values():
            stepping = executor.stepping
            assert isinstance(stepping, GradientSums)
            for name, gradient in stepping.gradients.items():
                executor.weights.parameters[name].grad = gradient
                gradients[name] = gradient.detach().clone()
        losses = self.learned.losses[before:]
        self.learned.losses[before:] = [sum(losses) / len(losses)]
        self.learned.outputs.append(self.given)
        self.learned.gradients.append(gradients)

    def _passes(self, microbatches: int) -> Iterator[tuple[tuple[int, int], Step]]:
        """All forward passes; then the backward passes, second halves at the end."""
        numbers, stages = range(microbatches), range(self.way.stages)
        backwards = [(stage, b) for b in numbers for stage in reversed(stages)]
        kinds = [(F, stage, b) for b in numbers for stage in stages]
        kinds += [(BI if self.way.halves else B, *each) for each in backwards]
        kinds += [(BW, *each) for each in backwards if self.way.halves]
        for kind, stage, b in kinds:
            yield (stage, 0), Step(0, kind, b, 0)

    def _loss(self, output: Any, target: Any) -> Tensor:
        self.given += tensors_of(output)
        return loss_of(output)

    @torch.no_grad()
    def evaluate(self) -> Learned:
        """What it gives in eval mode, as it is at the beginning."""
        for microbatch, size in enumerate((4, 3)):
            call = self.specimen.call(0, microbatch, size)
            self.given = []
            executors = {
                stage: self._evaluation(stage, call, size) for stage in range(len(self.forms))
            }
            ones, workers = (1,) * len(executors), [(stage, 0) for stage in executors]
            actions: list[Action] = forwards(ones, self.links, 1, workers)
            stream = ActionStream(TrainingSegment(0, 1), actions)
            Engine(executors, self.transport).run(stream, Microbatches([call]))
            self.learned.outputs.append(self.given)
            totals = executors[len(executors) - 1].totals.looked_at()
            self.learned.losses.append(float(totals.loss) / size)
        self._keep()
        return self.learned

    def _evaluation(self, stage: int, call: Inputs, size: int) -> EvaluationExecutor:
        form = self.forms[stage].of(Call(*call))[stage]
        named = (*form.piece.module.named_parameters(), *form.piece.module.named_buffers())
        return EvaluationExecutor(
            StageForms(form),
            self.transport,
            self.assignment,
            self._loss,
            dict(named),
            Sizes(size, size),
            EvaluationTotals(),
        )

    def _keep(self) -> None:
        """The parameters and buffers of all stages, over those that no stage holds."""
        model = self.specimen.model()
        self.learned.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.learned.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
        for stage, forms in enumerate(self.forms):
            for form in forms.forms.values():
                self._keep_of(form[stage])

    def _keep_of(self, form: StageModule) -> None:
        module, learned = form.piece.module, self.learned
        reads = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
        parameters = {n: p for n, p in module.named_parameters() if n in learned.parameters}
        learned.parameters |= {n: p.detach().clone() for n, p in parameters.items()}
        buffers = module.named_buffers()
        own = {n: b for n, b in buffers if n in learned.buffers and n in reads}
        learned.buffers |= {n: b.detach().clone() for n, b in own.items()}


def _adopted(captured: Captured, model: nn.Module) -> Captured:
    """A copy of what was captured, with the parameters and buffers of this model."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    for name, tensor in named:
        path, _, own = name.rpartition(".")
        with suppress(AttributeError):
            module = captured.module.get_submodule(path)
            if hasattr(module, own):
                setattr(module, own, tensor)
    return captured


def _groups(assignment: RankAssignment, tied: Any) -> Mapping[int, StageGroups]:
    meet()
    return SummingRanks(assignment, 0, tied).groups(Communicators({}, {}))


def meet() -> None:
    """Makes this process the only rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def captured_for(specimen: Specimen, training: bool = True) -> Captured:
    """As its first microbatch makes it."""
    model = specimen.model()
    args, kwargs = specimen.call(0, 0, 4)
    return capture(model, args, kwargs, training)


def cuts(captured: Captured) -> Collection[int]:
    """All places where it can be cut in two."""
    return range(1, len(captured.working))
