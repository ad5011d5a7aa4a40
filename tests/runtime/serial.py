"""The serial reference: what pipelined training has to compute, as a plain loop in one process.

It knows nothing of the engine. The weight versions of every stage stand in a list; minibatch b runs
through all stages as one graph, each stage on the version that the semantics name; its gradients go
to the round it belongs to, and a full round makes the next version.

A stage is a plain module split off by hand, that reads and writes named values:

    stages = [Stage(head, ("x",), ("hidden", "skip")), Stage(tail, ("hidden", "skip"), ("y",))]
    serial = Serial(stages, lambda ps: torch.optim.SGD(ps, lr=0.1), loss, "weight-stashing", (2, 1))
    losses = serial.epoch([Minibatch({"x": ...}, target), ...])
    serial.weights["head.weight"], serial.buffers

Parameters have the names they have in their modules, after the stage's `prefix`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from schedules import schedule
from torch import Tensor, nn
from torch.func import functional_call

from pipedream.schedule.action import Kind


@dataclass(frozen=True)
class Minibatch:
    """Inputs of the model by name, and what the loss compares with."""

    inputs: Mapping[str, Tensor]
    target: Any


@dataclass(frozen=True)
class Stage:
    """`module(*values it reads) -> the values it writes` (a tuple where there are several).

    `prefix` goes before the names of its parameters and buffers: `features.` for model.features.
    """

    module: nn.Module
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    prefix: str = ""

    def run(self, tensors: Mapping[str, Tensor], values: dict[str, Tensor]) -> None:
        """Adds what it writes to `values`; `tensors` are parameters and buffers by local names."""
        results = functional_call(self.module, dict(tensors), tuple(values[n] for n in self.reads))
        if isinstance(results, Tensor):
            results = (results,)
        values.update(zip(self.writes, results, strict=True))


@dataclass
class Learner:
    """A stage while it learns: its weights in all versions, its buffers on each replica."""

    stage: Stage
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    versions: list[dict[str, Tensor]]
    buffers: list[dict[str, Tensor]]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    """The version before the first of the list, which a prediction may ask for."""
    updates: int = 0
    delay: int = 0
    steps: dict[int, tuple[float, dict[str, Tensor]]] = field(default_factory=dict)
    """Of the epoch: the optimizer's own, with its learning rate, by the version they began at."""
    right: set[int] = field(default_factory=set)
    """Versions of the epoch whose step was made with gradients of theirs, in the end at least."""

    def ahead(self, version: int, updates: int) -> dict[str, Tensor]:
        """The weights of a version after so many more updates like the one that made it."""
        now = self.versions[version]
        then = self.versions[version - 1] if version else self.before or now
        return {name: now[name] + updates * (now[name] - then[name]) for name in now}

    def make_good(self, version: int, feedback: float, rate: float) -> None:
        """Adds what the step just made, whose gradients are of an older `version`, differs from
        the one that was made in its place, unless that was not late, or has been made good.
        """
        number = len(self.versions) - 1
        step = {name: p.detach() - self.versions[-1][name] for name, p in self.parameters.items()}
        self.steps[number] = rate, step
        if version == number or version in self.right:
            self.right.add(version)
            return
        self.right.add(version)
        old_rate, old = self.steps[version]
        for name, parameter in self.parameters.items():
            parameter.data += feedback * (step[name] - rate / old_rate * old[name])

    def update(
        self, divisor: int, rate_correction: int | None, feedback: float, version: int
    ) -> None:
        """`version`: the oldest that the gradients are of."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if rate_correction and self.delay:
            for group in groups:
                group["lr"] /= self.delay ** max(0.0, 1 - self.updates / rate_correction)
        for name, parameter in self.parameters.items():
            gradient = self.gradients.get(name)
            parameter.grad = None if gradient is None else gradient / divisor
        self.optimizer.step()
        if feedback:
            self.make_good(version, feedback, groups[0]["lr"])
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        self.updates += 1
        self.gradients = {}
        self.versions.append(copy(self.parameters))


class Serial:
    """`epoch` trains on a list of minibatches and drains; optimizers and weights carry over.

    `predict`, `rate_correction` and `feedback` as in the run config; the Nesterov form is an
    optimizer.
    `loss(values, target)` gets all named values of the minibatch. Random numbers are the caller's
    matter: leave dropout out, or make it depend on the values only.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss: Callable[[Mapping[str, Tensor], Any], Tensor],
        semantics: str,
        replicas: Sequence[int],
        microbatches: int = 1,
        accumulate: int = 1,
        *,
        predict: bool = False,
        rate_correction: int | None = None,
        feedback: float = 0.0,
    ) -> None:
        self.predict, self.rate_correction = predict, rate_correction
        self.feedback = feedback
        self.loss, self.semantics, self.microbatches = loss, semantics, microbatches
        self.accumulate = accumulate
        self.replicas = tuple(replicas)
        self.stages = []
        for stage, count in zip(stages, replicas, strict=True):
            start = copy(dict(stage.module.named_parameters()))
            parameters = {name: nn.Parameter(tensor) for name, tensor in start.items()}
            optimizer = make_optimizer(list(parameters.values()) or [nn.Parameter(torch.zeros(()))])
            buffers = [copy(dict(stage.module.named_buffers())) for _ in range(count)]
            self.stages.append(Learner(stage, parameters, optimizer, [copy(parameters)], buffers))

    @property
    def weights(self) -> dict[str, Tensor]:
        """The newest version, by the names in the model."""
        return {
            held.stage.prefix + name: tensor
            for held in self.stages
            for name, tensor in held.versions[-1].items()
        }

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The mean over the replicas, by the names in the model."""
        result = {}
        for held in self.stages:
            for name, first in held.buffers[0].items():
                mean = torch.stack([b[name].double() for b in held.buffers]).mean(0)
                result[held.stage.prefix + name] = mean.to(first.dtype)
        return result

    def epoch(self, minibatches: Sequence[Minibatch]) -> list[float]:
        """The loss of each minibatch. Versions count from 0 again, as a drained pipeline's do."""
        version = self._versions(len(minibatches))
        for stage, held in enumerate(self.stages):
            if len(held.versions) > 1:
                held.before = held.versions[-2]
            held.versions = held.versions[-1:]
            held.steps, held.right = {}, set()
            numbers = range(len(minibatches))
            held.delay = max(b // self._round(stage) - version(stage, b) for b in numbers)
        losses = []
        for number, minibatch in enumerate(minibatches):
            losses.append(self._learn(number, minibatch, version))
            for stage, held in enumerate(self.stages):
                done = number % self._round(stage) + 1
                if done == self._round(stage) or number == len(minibatches) - 1:
                    of = min(version(stage, number - each) for each in range(done))
                    held.update(done, self.rate_correction, self.feedback, of)
        for held in self.stages:
            averaged = {name: self.buffers[held.stage.prefix + name] for name in held.buffers[0]}
            held.buffers = [copy(averaged) for _ in held.buffers]
        return losses

    def _round(self, stage: int) -> int:
        """How many minibatches make one update of this stage."""
        by_replicas = self.semantics in ("weight-stashing", "vertical-sync")
        return self.replicas[stage] * self.accumulate if by_replicas else self.microbatches

    def _versions(self, minibatches: int) -> Callable[[int, int], int]:
        """(stage, minibatch) -> the version of the stage's weights that the minibatch runs on."""
        last, size, each = len(self.stages) - 1, self.microbatches, self.accumulate
        straight = set(self.replicas) == {1}
        if self.semantics in ("flush", "gpipe"):
            return lambda stage, minibatch: minibatch // size
        if self.semantics == "2bw":
            # W(t+1) = W(t) - lr * grad f(W(t-1)); there is no W(-1), so that W(0) is used twice
            return lambda stage, minibatch: max(0, minibatch // size - 1)
        if self.semantics == "weight-stashing":
            if straight:
                # w(t+1) = w(t) - lr * grad f(w_1(t-n+1), ..., w_n(t)), with `each` minibatches to
                # an update one version for so many
                return lambda stage, minibatch: max(0, minibatch - (last - stage)) // each
            table = self._played(minibatches)
            return lambda stage, minibatch: table[stage, minibatch]
        assert self.semantics == "vertical-sync"
        if straight:
            # w(t+1) = w(t) - lr * grad f(w_1(t-n+1), ..., w_n(t-n+1))
            return lambda stage, minibatch: max(0, minibatch - last) // each
        table = self._played(minibatches)
        return lambda stage, minibatch: self._as_old(stage, table[0, minibatch])

    def _as_old(self, stage: int, version: int) -> int:
        """The newest version of `stage` that knows nothing that `version` of stage 0 does not."""
        known = version * self._round(0)
        return max(v for v in range(known + 1) if v * self._round(stage) <= known)

    def _played(self, minibatches: int) -> dict[tuple[int, int], int]:
        """The versions in the order that stages of several replicas go by, which no formula has."""
        links, each = self._links(), self.accumulate
        made = schedule(self.semantics, self.replicas, links, minibatches, accumulate=each)
        return {
            (action.stage, action.minibatch): action.version
            for worker in made.workers
            for action in made.actions(worker)
            if action.kind is Kind.FORWARD
        }

    def _links(self) -> list[tuple[int, int]]:
        """Who reads what an earlier stage wrote."""
        writer = {
            name: number for number, held in enumerate(self.stages) for name in held.stage.writes
        }
        return [
            (writer[name], number)
            for number, held in enumerate(self.stages)
            for name in held.stage.reads
            if writer.get(name, number) != number
        ]

    def _learn(
        self, number: int, minibatch: Minibatch, version: Callable[[int, int], int]
    ) -> float:
        """Runs one minibatch through all stages, and adds its gradients to their rounds."""
        values = dict(minibatch.inputs)
        used = []
        for stage, held in enumerate(self.stages):
            on = version(stage, number)
            delay = number // self._round(stage) - on if self.predict else 0
            weights = copy(held.ahead(on, delay))
            used.append({name: tensor.requires_grad_() for name, tensor in weights.items()})
            buffers = held.buffers[number % self.replicas[stage]]
            held.stage.run({**weights, **buffers}, values)
        loss = self.loss(values, minibatch.target)
        wanted = [tensor for weights in used for tensor in weights.values()]
        found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
        for held, weights in zip(self.stages, used, strict=True):
            for name in weights:
                gradient = next(found)
                if gradient is not None:
                    before = held.gradients.get(name)
                    held.gradients[name] = gradient if before is None else before + gradient
        return loss.item()


def copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
