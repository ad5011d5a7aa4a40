"""What the captured model gives for a round of minibatches: a serial loop in one process.

No stage, message, program or replica takes part, so a pipeline that gives the same has them right.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from operator import itemgetter

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
from pipedream.capture.checks.rounding import RoundedOtherwise, may_jump, moved_inside
from pipedream.capture.loss import Loss
from pipedream.capture.segment import Segment, freeze_constants, segment
from pipedream.comm.device.memory import free_memory
from pipedream.graph.plan import Plan
from pipedream.graph.units import show_bytes
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.selfcheck.fingerprint import Fingerprint, apart, fingerprint
from pipedream.runtime.stages.partition import interfaces
from pipedream.runtime.stages.randomness import MinibatchRng, seed_each


@dataclass(frozen=True)
class Expected:
    """What a figure should be: its `fingerprint`, and how far from it one may be at `most`."""

    fingerprint: Fingerprint
    most: float


def loss_of(minibatch: int) -> str:
    """Returns what the loss of a minibatch is called among the figures."""
    return f"the loss of minibatch {minibatch}"


def buffer_on(name: str, replica: int) -> str:
    """Returns what a buffer is called as a replica of its stage has it after the round."""
    return f"{buffer_of(name)} of replica {replica}"


@dataclass
class Reference:
    """The captured model in one process; random operators draw from `rng`, the loss counts `scale`
    times.

    `reorders`: whether what is compared may add in another order all over, as compilers do.
    `replicas`: by name of a buffer, of the stage that has it; the b-th minibatch of a round changes
    that of replica b mod r. Buffers go on from round to round: `buffers` has them by name and
    replica, once the replica has had a minibatch.
    """

    loss: Loss
    rng: MinibatchRng
    scale: float
    replicas: Mapping[str, int]
    tolerance: Tolerance
    reorders: bool = False
    buffers: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @staticmethod
    def of(
        captured: Captured,
        plan: Plan,
        buffers: Set[str],
        loss: Loss,
        rng: MinibatchRng,
        tolerance: Tolerance | None,
        scale: float = 1.0,
        reorders: bool = False,
    ) -> Reference | None:
        """Returns that of a model with these `buffers`; None without tolerance, or room for it."""
        if tolerance is None or not has_room(captured, rng.device):
            return None
        replicas = buffer_replicas(captured, plan, buffers)
        return Reference(loss, rng, scale, replicas, tolerance, reorders)

    def round(self, minibatches: Mapping[int, tuple[Captured, Batch]]) -> dict[str, Expected]:
        """Returns the losses, mean gradients, and buffers afterwards, by name.

        `minibatches`: by number, in their order, each with the model as captured for its shape.
        """
        before = {key: buffer.clone() for key, buffer in self.buffers.items()}
        figures, rounded, jumped = self._figures(minibatches), dict[str, Tensor](), {}
        lower, model = self.tolerance.of_lower_type, next(iter(minibatches.values()))[0].module
        if lower or self.reorders:
            rounded = self._again(minibatches, before, RoundedOtherwise())
        if not lower and may_jump(model):
            jumped = self._again(minibatches, before, moved_inside(model, self.tolerance.relative))
        expected = {}
        for what, figure in figures.items():
            in_a_pass = re.split(" of (?:minibatch|replica) ", what)[0]
            most = self.tolerance.most(in_a_pass, figure, rounded.get(what), jumped.get(what))
            expected[what] = Expected(fingerprint(figure), most)
        return expected

    def _again(
        self,
        minibatches: Mapping[int, tuple[Captured, Batch]],
        before: Mapping[tuple[str, int], Tensor],
        changed: AbstractContextManager[object],
    ) -> dict[str, Tensor]:
        """Returns the figures from buffers `before`, in such a context."""
        after, self.buffers = self.buffers, {key: each.clone() for key, each in before.items()}
        with changed:
            figures = self._figures(minibatches)
        self.buffers = after
        return figures

    def _figures(self, minibatches: Mapping[int, tuple[Captured, Batch]]) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        sums: dict[str, Tensor] = {}
        models = [captured for captured, _ in minibatches.values()]
        with _on_device(models, self.rng) as pieces:
            for position, (number, (captured, batch)) in enumerate(minibatches.items()):
                self.rng.minibatch = number
                loss = self._forward(captured, pieces[id(captured)], batch, position)
                losses[loss_of(number)] = loss.detach()
                _add_gradients(sums, loss * self.scale, pieces[id(captured)])
        parts = len(minibatches) * self.scale
        gradients = {gradient_of(name): sum_ / parts for name, sum_ in sums.items()}
        buffers = {buffer_on(*key): buffer for key, buffer in self.buffers.items()}
        return losses | gradients | buffers

    def _forward(self, captured: Captured, piece: Segment, batch: Batch, position: int) -> Tensor:
        batch = batch.to(self.rng.device)
        known = dict(zip(captured.inputs, batch.inputs, strict=False))
        inputs = tuple(known[name] for name in piece.inputs)
        with captured.precision.computing(), torch.enable_grad():
            results = functional_call(piece.module, self._buffers_at(position, piece), inputs)
            known |= zip(piece.outputs, results, strict=True)
            output = rebuild([known[name] for name in captured.outputs], captured.out_spec)
            return self.loss(output, batch.target)

    def _buffers_at(self, position: int, piece: Segment) -> dict[str, Tensor]:
        """Returns those that the pass of a minibatch reads and writes."""
        buffers: dict[str, Tensor] = {}
        for name, buffer in piece.module.named_buffers():
            if name in self.replicas:
                key = name, position % self.replicas[name]
                buffers[name] = self.buffers.setdefault(key, buffer.detach().clone())
        return buffers


@contextmanager
def _on_device(captures: Iterable[Captured], rng: MinibatchRng) -> Iterator[dict[int, Segment]]:
    """Yields the models each as one piece, by identity; inside, on the device of the run."""
    pieces: dict[int, Segment] = {}
    where: list[tuple[Tensor, torch.device]] = []
    try:
        for captured in captures:
            if id(captured) not in pieces:
                where += [(each, each.device) for each in captured.module.parameters()]
                piece = segment(captured, captured.working, keep=captured.outputs)
                freeze_constants(piece.to(rng.device), captured.owner)
                seed_each(piece, captured.module, rng)
                pieces[id(captured)] = piece
        yield pieces
    finally:
        for parameter, device in reversed(where):
            parameter.data = parameter.data.to(device)


def _add_gradients(sums: dict[str, Tensor], loss: Tensor, piece: Segment) -> None:
    learned = {name: p for name, p in piece.module.named_parameters() if p.requires_grad}
    if not loss.requires_grad or not learned:
        return
    gradients = torch.autograd.grad(loss, list(learned.values()), allow_unused=True)
    for name, gradient in zip(learned, gradients, strict=True):
        if gradient is not None:
            sums[name] = sums[name] + gradient if name in sums else gradient


def buffer_replicas(captured: Captured, plan: Plan, buffers: Set[str]) -> dict[str, int]:
    """Returns by the name of a buffer the replicas of the stage that has it."""
    faces = interfaces(captured, plan)
    stage_of = {node: face.stage for face in faces for node in face.nodes}
    buffer_stage_replicas: dict[str, int] = {}
    for node in captured.module.graph.find_nodes(op="get_attr"):
        owners = (captured.owner.get(user.name) for user in node.users)
        stages = {stage_of[owner] for owner in owners if owner is not None}
        if stages and node.target in buffers:
            buffer_stage_replicas[str(node.target)] = plan.replicas[min(stages)]
    return buffer_stage_replicas


def has_room(captured: Captured, device: torch.device) -> bool:
    """Tells whether the whole model can be computed on the device; says so if not."""
    values, parameters = captured.values.values(), captured.module.parameters()
    copies = 4 if may_jump(captured.module) else 2  # moved parameters have gradients of their own
    needed = 2 * sum(value.bytes for value in values) + copies * sum(p.nbytes for p in parameters)
    free = free_memory(device)
    if needed > free:
        reason = f"{show_bytes(needed)} for the whole model, and {show_bytes(free)} are free"
        print(f"training: not checked against the model: {reason}", file=sys.stderr, flush=True)
    return needed <= free


def worst_of(
    expected: Mapping[str, Expected], figures: Mapping[str, Fingerprint | None], where: str
) -> tuple[float, str]:
    """Returns how far the figure that is furthest off is, in parts of what is allowed, and the
    message.

    None stands for a gradient that is missing. Where the model has none, zeros are another thing:
    weight decay and momentum would move the parameter.
    """
    compared = (
        _compared(what, expected.get(what), figure, f"the pipeline ({where})")
        for what, figure in figures.items()
        if what in expected or (figure is not None and is_gradient(what))
    )
    return max((pair for pair in compared if pair[0] > 0), key=itemgetter(0), default=(0.0, ""))


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
