"""What the captured model gives for a round of minibatches: a serial loop in one process.

No stage, message, program or replica takes part, so a pipeline that gives the same has them right.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from pipedream.capture.captured import Captured, rebuild
from pipedream.capture.checks.equivalence import (
    Tolerance,
    buffer_of,
    difference,
    gradient_of,
    is_gradient,
)
from pipedream.capture.checks.rounding import RoundedOtherwise
from pipedream.capture.loss import Loss
from pipedream.capture.segment import Segment, freeze_constants, segment
from pipedream.comm.memory import free_memory
from pipedream.graph.units import show_bytes
from pipedream.runtime.data.reader import Batch
from pipedream.runtime.selfcheck.fingerprint import Fingerprint, apart, fingerprint
from pipedream.runtime.stages.partition import StageInterface
from pipedream.runtime.stages.randomness import MinibatchRng, operator_positions, seed_each


@dataclass(frozen=True)
class Expected:
    """What a figure should be: its `fingerprint`, and how far from it one may be at `most`."""

    fingerprint: Fingerprint
    most: float


def loss_of(minibatch: int) -> str:
    """What the loss of a minibatch is called among the figures."""
    return f"the loss of minibatch {minibatch}"


def buffer_on(name: str, replica: int) -> str:
    """What a buffer is called as a replica of its stage has it after the round."""
    return f"{buffer_of(name)} of replica {replica}"


@dataclass(frozen=True)
class Settings:
    """How a run computes: random operators draw from `rng`, the loss counts `scale` times."""

    loss: Loss
    rng: MinibatchRng
    scale: float


class Reference:
    """`replicas`: by name of a buffer, of the stage that has it; the b-th minibatch of a round
    changes that of replica b mod r. Buffers go on from round to round: `buffers` has them by name
    and replica, once the replica has had a minibatch.
    """

    def __init__(
        self, settings: Settings, replicas: Mapping[str, int], tolerance: Tolerance
    ) -> None:
        self.settings, self.replicas, self.tolerance = settings, replicas, tolerance
        self.buffers: dict[tuple[str, int], Tensor] = {}

    def round(self, minibatches: Mapping[int, tuple[Captured, Batch]]) -> dict[str, Expected]:
        """The losses, mean gradients, and buffers afterwards, by name.

        `minibatches`: by number, in their order, each with the model as captured for its shape.
        """
        before = {key: buffer.clone() for key, buffer in self.buffers.items()}
        figures, others = self._figures(minibatches), dict[str, Tensor]()
        if self.tolerance.of_lower_type:
            after, self.buffers = self.buffers, before
            with RoundedOtherwise():
                others = self._figures(minibatches)
            self.buffers = after
        return {
            what: Expected(fingerprint(figure), self._most(what, figure, others.get(what)))
            for what, figure in figures.items()
        }

    def _most(self, what: str, figure: Tensor, rounded: Tensor | None) -> float:
        in_a_pass = re.split(" of (?:minibatch|replica) ", what)[0]
        return self.tolerance.most(in_a_pass, figure, rounded)

    def _figures(self, minibatches: Mapping[int, tuple[Captured, Batch]]) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        sums: dict[str, Tensor] = {}
        with _on_device([each for each, _ in minibatches.values()], self.settings.rng) as pieces:
            for position, (number, (captured, batch)) in enumerate(minibatches.items()):
                self.settings.rng.minibatch = number
                loss = self._forward(captured, pieces[id(captured)], batch, position)
                losses[loss_of(number)] = loss.detach()
                _add_gradients(sums, loss * self.settings.scale, pieces[id(captured)])
        parts = len(minibatches) * self.settings.scale
        gradients = {gradient_of(name): sum_ / parts for name, sum_ in sums.items()}
        buffers = {buffer_on(*key): buffer for key, buffer in self.buffers.items()}
        return losses | gradients | buffers

    def _forward(self, captured: Captured, piece: Segment, batch: Batch, position: int) -> Tensor:
        settings, batch = self.settings, batch.to(self.settings.rng.device)
        known = dict(zip(captured.inputs, batch.inputs, strict=False))
        inputs = tuple(known[name] for name in piece.inputs)
        with captured.precision.computing(), torch.enable_grad():
            results = functional_call(piece.module, self._buffers_at(position, piece), inputs)
            known |= zip(piece.outputs, results, strict=True)
            output = rebuild([known[name] for name in captured.outputs], captured.out_spec)
            return settings.loss(output, batch.target)

    def _buffers_at(self, position: int, piece: Segment) -> dict[str, Tensor]:
        """Those that the pass of a minibatch reads and writes."""
        own: dict[str, Tensor] = {}
        for name, buffer in piece.module.named_buffers():
            if name in self.replicas:
                key = name, position % self.replicas[name]
                own[name] = self.buffers.setdefault(key, buffer.detach().clone())
        return own


@contextmanager
def _on_device(captures: Iterable[Captured], rng: MinibatchRng) -> Iterator[dict[int, Segment]]:
    """The models each as one piece, by identity; on the device of the run inside the context."""
    pieces: dict[int, Segment] = {}
    where: list[tuple[Tensor, torch.device]] = []
    try:
        for captured in captures:
            if id(captured) not in pieces:
                where += [(each, each.device) for each in captured.module.parameters()]
                piece = segment(captured, captured.working, keep=captured.outputs)
                freeze_constants(piece.to(rng.device), captured.owner)
                seed_each(piece, operator_positions(captured.module), rng)
                pieces[id(captured)] = piece
        yield pieces
    finally:
        for parameter, device in reversed(where):
            parameter.data = parameter.data.to(device)


def _add_gradients(sums: dict[str, Tensor], loss: Tensor, piece: Segment) -> None:
    learned = {name: p for name, p in piece.module.named_parameters() if p.requires_grad}
    if not loss.requires_grad or not learned:
        return
    found = torch.autograd.grad(loss, list(learned.values()), allow_unused=True)
    for name, gradient in zip(learned, found, strict=True):
        if gradient is not None:
            sums[name] = sums[name] + gradient if name in sums else gradient


def buffer_replicas(
    captured: Captured,
    interfaces: Sequence[StageInterface],
    replicas: Sequence[int],
    buffers: Set[str],
) -> dict[str, int]:
    """By the name of a buffer the replicas of the stage that has it."""
    stage_of = {node: face.stage for face in interfaces for node in face.nodes}
    found: dict[str, int] = {}
    for node in captured.module.graph.find_nodes(op="get_attr"):
        owners = (captured.owner.get(user.name) for user in node.users)
        stages = {stage_of[owner] for owner in owners if owner is not None}
        if stages and node.target in buffers:
            found[str(node.target)] = replicas[min(stages)]
    return found


def has_room(captured: Captured, device: torch.device) -> bool:
    """Whether the whole model can be computed on the device; says so if not."""
    values, parameters = captured.values.values(), captured.module.parameters()
    needed = 2 * sum(value.bytes for value in values) + 2 * sum(p.nbytes for p in parameters)
    there = free_memory(device)
    if needed > there:
        told = f"{show_bytes(needed)} for the whole model, and {show_bytes(there)} are free"
        print(f"training: not checked against the model: {told}", file=sys.stderr, flush=True)
    return needed <= there


def worst_of(
    expected: Mapping[str, Expected], figures: Mapping[str, Fingerprint | None], where: str
) -> tuple[float, str]:
    """How far the figure that is furthest off is, in parts of what is allowed, and the message.

    None stands for a gradient that is missing. Where the model has none, zeros are another thing:
    weight decay and momentum would move the parameter.
    """
    worst, told = 0.0, ""
    for what, figure in figures.items():
        wanted = expected.get(what)
        if wanted is None and (figure is None or not is_gradient(what)):
            continue
        parts, message = _compared(what, wanted, figure, f"the pipeline ({where})")
        if parts > worst:
            worst, told = parts, message
    return worst, told


def _compared(
    what: str, wanted: Expected | None, figure: Fingerprint | None, where: str
) -> tuple[float, str]:
    if wanted is None:
        return math.inf, (
            f"self-check: {what} in {where} is there, and the model's own is not: weight decay and "
            "momentum would move the parameter; leave out what the loss does not depend on, or "
            "freeze it; --unchecked (checked=False) trains all the same"
        )
    size, most = wanted.fingerprint[0], wanted.most
    off = size if figure is None else apart(wanted.fingerprint, figure)
    parts = 0.0 if not off else off / most if most else math.inf
    return parts, difference(what, where, off, size, most)
