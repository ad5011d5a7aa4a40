"""Evaluation of held-out data through the pipeline: forward passes in eval mode, on all replicas.

Dropout and batch norm differ in training, so the model is captured once more in eval mode. Its
nodes are the calls of the same modules, and each stage takes its own. Every example counts: the
last minibatch has what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipedream.capture.captured import Captured
from pipedream.capture.loss import Loss, Metric, accuracy
from pipedream.comm.transport import Transport
from pipedream.graph.plan import Plan, RankAssignment
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.data.order import Sizes
from pipedream.runtime.engine.engine import Engine, minibatches_read
from pipedream.runtime.engine.forward import ForwardExecutor, Minibatches, Tensors, computing
from pipedream.runtime.engine.minibatch_state import MinibatchState
from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.run.training_segment import TrainingSegment
from pipedream.runtime.stages.partition import StageInterface, first_difference, interfaces, links
from pipedream.runtime.stages.stage_forms import StageForms
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.runtime.supervise.device_progress import DeviceProgress
from pipedream.schedule.action import Action, Worker
from pipedream.schedule.schedule import forwards

MOST_ON_THEIR_WAY = 4
"""Passes of a stage after which its rank waits until all that it has sent has arrived."""

Evaluator = TypeVar("Evaluator", bound="EvaluationExecutor")


@dataclass
class EvaluationTotals:
    """Summed losses of some examples, how many of their `predictions` were `right`, and by name the
    sums of the user's `metrics` and of how many values. What is added up on a device stays there
    until `looked_at`.
    """

    loss: float | Tensor = 0.0
    examples: int = 0
    right: int | Tensor = 0
    predictions: int = 0
    metrics: dict[str, Sequence[float]] = field(default_factory=dict)

    def add(
        self,
        loss: float | Tensor,
        examples: int,
        hit: tuple[int | Tensor, int] | None,
        metrics: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Adds `examples` with this mean loss, and how many of how many predictions were right."""
        self.metrics = _added([self.metrics, metrics or {}])
        self.loss = self.loss + loss * examples
        self.examples += examples
        if hit:
            self.right, self.predictions = self.right + hit[0], self.predictions + hit[1]
        else:
            self.right = self.predictions = 0

    def add_outputs(
        self,
        output: Any,
        target: Any,
        examples: int,
        loss: Loss,
        metrics: Mapping[str, Metric],
    ) -> None:
        """Adds what the model returns for so many examples."""
        mean, hit = loss(output, target).double(), accuracy(output, target)
        self.add(mean, examples, hit, {name: of(output, target) for name, of in metrics.items()})

    def looked_at(self) -> EvaluationTotals:
        """Returns them as numbers, for which a GPU is waited for."""
        return replace(self, loss=float(self.loss), right=int(self.right))

    @staticmethod
    def result(of_ranks: Iterable[Sequence[Any]]) -> dict[str, float]:
        """Returns `held_out_loss`, if there are predictions `held_out_accuracy`, and the user's
        metrics, as `held_out_NAME`.

        `of_ranks` has the totals of each rank, as tuples: the loss is the mean over the examples,
        the accuracy the share of right predictions.
        """
        *numbers, metrics = zip(*of_ranks, strict=True)
        loss, examples, right, predictions = map(sum, numbers)
        mean = {"held_out_loss": loss / examples}
        if predictions:
            mean["held_out_accuracy"] = right / predictions
        own = _added(metrics).items()
        return mean | {f"held_out_{name}": total / count for name, (total, count) in own if count}


def _added(sums: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, Sequence[float]]:
    """Adds up the sums and counts of several, by name."""
    added: dict[str, Sequence[float]] = {}
    for name, (total, count) in chain.from_iterable(each.items() for each in sums):
        total_before, count_before = added.get(name, (0.0, 0.0))
        added[name] = (total_before + total, count_before + count)
    return added


def obstacle(captured: Captured, plan: Plan, first: Batch, kind: str | None) -> str | None:
    """Returns why the model, captured in eval mode, cannot go through the pipeline, or None.

    `first` is the first held-out minibatch, `kind` the shapes and types of the training set.
    """
    if first.kind != kind:
        return f"its inputs are {first.kind}, those of the training set {kind}"
    difference = first_difference(plan.graph, captured.graph)
    return difference and f"in eval mode the model has another structure: {difference}"


@dataclass
class EvaluationExecutor(ForwardExecutor):
    """Evaluates one stage with the parameters and buffers `tensors`; the last adds to `totals`."""

    tensors: Mapping[str, Tensor]
    sizes: Sizes
    totals: EvaluationTotals
    metrics: Mapping[str, Metric] = field(default_factory=dict, kw_only=True)
    passes: int = field(default=0, init=False)
    made: dict[int, Tensors] = field(default_factory=dict, init=False)

    def _tensors(self, stage_module: StageModule) -> Tensors:
        """Returns what a stage computes with, made once for all minibatches of a form."""
        form = id(stage_module)
        if form not in self.made:
            self.made[form] = stage_module.evaluated_with(self.tensors)
        return self.made[form]

    def _compute(
        self, action: Action, state: MinibatchState, stage_module: StageModule, known: Tensors
    ) -> Tensors:
        piece, program = stage_module.piece, stage_module.program
        inputs = tuple(known[name] for name in piece.inputs)
        with computing(action):
            if self.sharding is None:
                results = stage_module.compute(self._tensors(stage_module), inputs)
            else:
                named = program.on_mesh(self.tensors, known)
                tensors = program.state(self.tensors, named)
                results, _ = named.program.forward(tensors, inputs, named.program.draw())
        return dict(zip(piece.outputs, results, strict=True))

    def _take_outputs(
        self, action: Action, state: MinibatchState, stage_module: StageModule, known: Tensors
    ) -> None:
        output, target = stage_module.output(known), self.data.target(action.minibatch)
        examples = self.sizes.of(action.minibatch)
        self.totals.add_outputs(output, target, examples, self.loss, self.metrics)

    def _after_forward(
        self, action: Action, state: MinibatchState, interface: StageInterface, values: Tensors
    ) -> None:
        if not interface.sends:
            self._activations_sent(action.minibatch, state)

    def _activations_sent(self, minibatch: int, state: MinibatchState) -> None:
        """Called when the minibatch is done with this stage."""
        self._recycle(state)
        del self.states[minibatch]
        self.passes += 1
        if self.passes % MOST_ON_THEIR_WAY == 0:  # a fast stage waits for the slower ones
            self.transport.drain()


@dataclass(frozen=True)
class Evaluation:
    """A rank's part in the evaluation: its stages in eval mode, and its actions."""

    stage_modules: Mapping[int, StageForms]
    sizes: Sizes
    actions: Sequence[Action]
    assignment: RankAssignment

    @staticmethod
    def of(
        captured: Captured,
        rest: Captured | None,
        plan: Plan,
        workers: Sequence[Worker],
        sizes: Sizes,
    ) -> Evaluation:
        """Of a model without `obstacle`; `rest` was captured for a smaller last minibatch."""
        smaller = {} if rest is None or sizes.last is None else {sizes.last: rest}
        stage_modules = {
            stage: StageForms(
                StageModule.of(captured, plan, stage),
                {number: StageModule.of(each, plan, stage) for number, each in smaller.items()},
            )
            for stage, _ in workers
        }
        every = links(interfaces(captured, plan))
        actions = forwards(plan.replicas, every, len(sizes), workers)
        return Evaluation(stage_modules, sizes, actions, plan.rank_assignment)

    def join_meshes(self, trained: Mapping[int, StageModule]) -> None:
        """Makes this rank evaluate its device's part of each stage that is `trained` on a mesh."""
        for stage, forms in self.stage_modules.items():
            for form in (forms.usual, *forms.others.values()):
                form.join_mesh(trained[stage])

    @property
    def minibatches_read(self) -> list[int]:
        """The minibatches whose inputs or targets this rank needs."""
        interfaces = [forms.usual.interface for forms in self.stage_modules.values()]
        return minibatches_read(self.actions, interfaces, len(self.assignment))

    def run(
        self,
        data: Minibatches,
        tensors: Mapping[int, Mapping[str, Tensor]],
        transport: Transport,
        loss: Loss,
        kind: Callable[..., Evaluator],
        progress: DeviceProgress | None = None,
    ) -> tuple[EvaluationTotals, list[Evaluator]]:
        """Evaluates this rank's minibatches with the parameters and buffers of each of its stages,
        by executors of this `kind`. Returns the totals, and the executors.

        Raises PeerLost, and UserError if model, data or loss are at fault.
        """
        totals = EvaluationTotals()
        executors = {
            stage: kind(
                forms,
                transport,
                self.assignment,
                loss,
                {name: tensor.detach() for name, tensor in tensors[stage].items()},
                self.sizes,
                totals,
                sharding=forms.usual.program.sharding,
            )
            for stage, forms in self.stage_modules.items()
        }
        stream = ActionStream(TrainingSegment(0, len(self.sizes)), self.actions)
        with torch.no_grad():
            Engine(executors, transport, progress=progress).run(stream, data)
        return totals.looked_at(), list(executors.values())
