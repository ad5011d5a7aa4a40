"""Held-out data through the pipeline: forward passes alone, in eval mode, on all replicas.

Dropout and batch norm do other things than in training, so the model is captured once more in eval
mode. The nodes are the calls of its modules, the same as in training, and each stage takes its own.
Every example is tried: the last minibatch has what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import torch

from pipedream.capture.export import Captured
from pipedream.capture.loss import Loss, accuracy
from pipedream.comm.transport import Message, Transport
from pipedream.graph.plan import Plan
from pipedream.runtime.data.reader import Batch, Reader
from pipedream.runtime.data.sizes import Sizes
from pipedream.runtime.stages.compile import plain
from pipedream.runtime.stages.partition import Layout, first_difference, layouts, links
from pipedream.runtime.stages.stage_module import StageModule, StageModules
from pipedream.schedule.action import Action, Kind, Worker
from pipedream.schedule.channel import Channel
from pipedream.schedule.schedule import forwards

AHEAD = 4
"""How many messages are posted, and how many minibatches may be on their way to the next stage."""


class EvaluationTotals:
    """Losses and predictions of some examples."""

    def __init__(self, loss: float = 0.0, examples: int = 0, right: int = 0, of: int = 0) -> None:
        self.loss, self.examples, self.right, self.of = loss, examples, right, of

    def add(self, loss: float, examples: int, hit: tuple[int, int] | None) -> None:
        """`loss` is the mean of `examples`; `hit` how many of how many predictions were right."""
        self.loss += loss * examples
        self.examples += examples
        self.right, self.of = (self.right + hit[0], self.of + hit[1]) if hit else (0, 0)

    @property
    def told(self) -> list[float]:
        return [self.loss, self.examples, self.right, self.of]

    @staticmethod
    def result(told: Sequence[Sequence[float]]) -> dict[str, float]:
        """`held_out_loss` and, where there are predictions, `held_out_accuracy`, of all ranks."""
        loss, examples, right, predictions = map(sum, zip(*told, strict=True))
        found = {"held_out_loss": loss / examples}
        return found | ({"held_out_accuracy": right / predictions} if predictions else {})


def obstacle(captured: Captured, plan: Plan, first: Batch, kind: str | None) -> str | None:
    """Why the model, captured in eval mode, cannot go through the pipeline of `plan`, if so.

    `first` is the first held-out minibatch, `kind` what those of the training set are.
    """
    if first.kind != kind:
        return f"its inputs are {first.kind}, those of the training set {kind}"
    difference = first_difference(plan.graph, captured.graph)
    if difference is not None:
        return f"in eval mode the model has another structure: {difference}"
    return None


@dataclass(frozen=True)
class EvaluationStage:
    """One worker's part in it; `stage_modules` are of the model in eval mode."""

    stage_modules: StageModules
    sizes: Sizes
    actions: Sequence[Action]
    ranks: Sequence[Sequence[int]]

    @staticmethod
    def of(
        captured: Captured,
        rest: Captured | None,
        plan: Plan,
        worker: Worker,
        sizes: Sizes,
        device: torch.device,
    ) -> EvaluationStage:
        """Of a model with no `obstacle`; `rest` is of the last minibatch, if that is smaller."""

        def stage_module(captured: Captured) -> StageModule:
            layout = layouts(captured, plan)[worker[0]]
            return StageModule.of(captured, layout, device, lambda _, piece: plain(piece))

        stage_modules = StageModules(
            stage_module(captured), stage_module(rest) if rest else None, sizes.last
        )
        every = links(layouts(captured, plan))
        actions = forwards(plan.replicas, every, len(sizes), worker)
        return EvaluationStage(stage_modules, sizes, actions, plan.process_ranks)

    @property
    def layout(self) -> Layout:
        return self.stage_modules.whole.layout

    @property
    def is_last(self) -> bool:
        return self.layout.stage == len(self.ranks) - 1

    def to_read(self) -> list[int]:
        """The minibatches whose inputs or targets this worker needs."""
        passes = [action.minibatch for action in self.actions if action.kind is Kind.FORWARD]
        return passes if self.layout.reads or self.is_last else []

    def run(
        self,
        data: Reader,
        tensors: Mapping[str, torch.Tensor],
        transport: Transport,
        loss: Loss,
    ) -> EvaluationTotals:
        """Runs this worker's minibatches on the parameters and buffers `tensors`.

        Raises PeerLost, and UserError where data or loss are at fault.
        """
        totals = EvaluationTotals()
        receives = [action for action in self.actions if action.kind is Kind.RECV_ACTIVATION]
        coming = iter(receives)
        for action in islice(coming, AHEAD):
            self._post(action, transport)
        passes = groupby(self.actions, key=lambda action: action.minibatch)
        for done, (minibatch, actions) in enumerate(passes, start=1):
            stage_module = self.stage_modules.of(minibatch)
            known: dict[str, torch.Tensor] = {}
            messages: list[tuple[Channel, Message]] = []
            for action in actions:
                if action.kind is Kind.RECV_ACTIVATION:
                    messages.append(self._receive(action, transport, known))
                    for following in islice(coming, 1):
                        self._post(following, transport)
                elif action.kind is Kind.FORWARD:
                    self._forward(stage_module, minibatch, data, tensors, known)
                else:
                    assert action.peer is not None
                    values = stage_module.layout.sends[action.peer[0]]
                    # A copy: what was received may be passed on, and its memory be used again.
                    sent = [known[value.name].clone() for value in values]
                    transport.send(Channel.of(action, self.ranks), sent)
            if self.is_last:
                output, target = stage_module.output(known), data.target(minibatch)
                hit = accuracy(output, target)
                totals.add(loss(output, target).item(), self.sizes.of(minibatch), hit)
            for channel, message in messages:
                transport.recycle(channel, message)
            if done % AHEAD == 0:  # a fast stage waits, so that its messages do not pile up
                transport.drain()
        transport.drain()
        return totals

    def _post(self, action: Action, transport: Transport) -> None:
        assert action.peer is not None
        layout = self.stage_modules.of(action.minibatch).layout
        transport.post(Channel.of(action, self.ranks), layout.receives[action.peer[0]])

    def _receive(
        self, action: Action, transport: Transport, known: dict[str, torch.Tensor]
    ) -> tuple[Channel, Message]:
        assert action.peer is not None
        channel = Channel.of(action, self.ranks)
        message = transport.receive(channel)
        values = self.stage_modules.of(action.minibatch).layout.receives[action.peer[0]]
        known |= {value.name: tensor for value, tensor in zip(values, message, strict=True)}
        return channel, message

    def _forward(
        self,
        stage_module: StageModule,
        minibatch: int,
        data: Reader,
        tensors: Mapping[str, torch.Tensor],
        known: dict[str, torch.Tensor],
    ) -> None:
        reads = stage_module.layout.reads
        if reads:
            known |= dict(zip(reads, data.inputs(minibatch, reads.values()), strict=True))
        inputs = tuple(known[name] for name in stage_module.piece.inputs)
        results = stage_module.compute(tensors, inputs)
        known |= dict(zip(stage_module.piece.outputs, results, strict=True))
