"""Evaluation of held-out data through the pipeline: forward passes alone, in eval mode, on all
replicas.

Dropout and batch norm differ in training, so the model is captured once more in eval mode. Its
nodes are the calls of the same modules, and each stage takes its own. Every example counts: the
last minibatch has what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pipedream.capture.export import Captured
from pipedream.capture.loss import Loss, accuracy
from pipedream.comm.transport import Transport
from pipedream.graph.plan import Plan, RankAssignment
from pipedream.runtime.data.order import Sizes
from pipedream.runtime.data.reader import Batch, Epoch, Reader
from pipedream.runtime.engine.action_stream import ActionStream
from pipedream.runtime.engine.engine import Engine, minibatches_read
from pipedream.runtime.engine.forward import ForwardExecutor, Table, apart
from pipedream.runtime.engine.minibatch_state import MinibatchState
from pipedream.runtime.engine.training_segment import TrainingSegment
from pipedream.runtime.stages.partition import first_difference, layouts, links
from pipedream.runtime.stages.stage_module import StageModule, StageModules, plain
from pipedream.schedule.action import Action, Kind, Worker
from pipedream.schedule.schedule import forwards

MOST_ON_THEIR_WAY = 4
"""Passes of a stage after which its rank waits until all that it has sent has arrived."""


class EvaluationTotals:
    """Losses and predictions of some examples."""

    def __init__(self, loss: float = 0.0, examples: int = 0, right: int = 0, of: int = 0) -> None:
        self.loss, self.examples, self.right, self.of = loss, examples, right, of

    def add(self, loss: float, examples: int, hit: tuple[int, int] | None) -> None:
        """Adds `examples` with this mean loss, and hits: how many of how many predictions were
        right.
        """
        self.loss += loss * examples
        self.examples += examples
        self.right, self.of = (self.right + hit[0], self.of + hit[1]) if hit else (0, 0)

    @property
    def as_json(self) -> list[float]:
        return [self.loss, self.examples, self.right, self.of]

    @staticmethod
    def result(of_ranks: Sequence[Sequence[float]]) -> dict[str, float]:
        """Returns `held_out_loss` and, if there are predictions, `held_out_accuracy`, over all
        ranks.
        """
        loss, examples, right, predictions = map(sum, zip(*of_ranks, strict=True))
        mean = {"held_out_loss": loss / examples}
        return mean | ({"held_out_accuracy": right / predictions} if predictions else {})


def obstacle(captured: Captured, plan: Plan, first: Batch, kind: str | None) -> str | None:
    """Returns why the model, captured in eval mode, cannot go through the pipeline of `plan`, or
    None.

    `first` is the first held-out minibatch, `kind` the shapes and types of the training set.
    """
    if first.kind != kind:
        return f"its inputs are {first.kind}, those of the training set {kind}"
    difference = first_difference(plan.graph, captured.graph)
    if difference is not None:
        return f"in eval mode the model has another structure: {difference}"
    return None


@dataclass
class EvaluationExecutor(ForwardExecutor):
    """Evaluates one stage with the parameters and buffers `tensors`; the last stage adds to
    `totals`.
    """

    tensors: Mapping[str, torch.Tensor]
    sizes: Sizes
    totals: EvaluationTotals
    passes: int = field(default=0, init=False)

    @property
    def table(self) -> Table:
        return {
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
        }

    def _forward(self, action: Action) -> None:
        state = self.states.setdefault(action.minibatch, MinibatchState())
        stage_module = self.stage_modules.of(action.minibatch)
        known = self._read(action, state)
        inputs = tuple(known[name] for name in stage_module.piece.inputs)
        values = self._compute(action, stage_module, self.tensors, inputs)
        if self.is_last(action):
            output, target = (
                stage_module.output({**known, **values}),
                self.data.target(action.minibatch),
            )
            mean, hit = self.loss(output, target).item(), accuracy(output, target)
            self.totals.add(mean, self.sizes.of(action.minibatch), hit)
        layout = stage_module.layout
        state.leaving = {name: apart(values[name], state.received) for name in layout.sent}
        if not layout.sends:
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

    stage_modules: Mapping[int, StageModules]
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
        device: torch.device,
    ) -> Evaluation:
        """For a model without `obstacle`; `rest` is captured for the last minibatch, if that is
        smaller.
        """

        def stage_module(captured: Captured, stage: int) -> StageModule:
            layout = layouts(captured, plan)[stage]
            return StageModule.of(captured, layout, device, lambda _, piece: plain(piece))

        stage_modules = {
            stage: StageModules(
                stage_module(captured, stage),
                stage_module(rest, stage) if rest else None,
                sizes.last,
            )
            for stage, _ in workers
        }
        every = links(layouts(captured, plan))
        actions = forwards(plan.replicas, every, len(sizes), workers)
        return Evaluation(stage_modules, sizes, actions, plan.rank_assignment)

    def run(
        self,
        held_out: Epoch,
        tensors: Mapping[int, Mapping[str, torch.Tensor]],
        transport: Transport,
        loss: Loss,
    ) -> EvaluationTotals:
        """Evaluates this rank's minibatches with the parameters and buffers of each of its stages.

        Raises PeerLost, and UserError if model, data or loss are at fault.
        """
        totals = EvaluationTotals()
        executors = {
            stage: EvaluationExecutor(
                stage_modules, transport, self.assignment, loss, tensors[stage], self.sizes, totals
            )
            for stage, stage_modules in self.stage_modules.items()
        }
        layouts = [each.whole.layout for each in self.stage_modules.values()]
        minibatches = minibatches_read(self.actions, layouts, len(self.assignment))
        stream = ActionStream(TrainingSegment(0, len(self.sizes)), self.actions)
        with torch.no_grad(), Reader(held_out, minibatches) as data:
            Engine(executors, transport).run(stream, data)
        return totals
