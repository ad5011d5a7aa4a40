"""What the captured model gives for a round of minibatches: a serial loop in one process.

No stage, message, program or replica takes part, so a pipeline that gives the same has them right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from pipedream.capture.compute_settings import lowered
from pipedream.capture.equivalence import Tolerance, buffer_of, gradient_of
from pipedream.capture.export import Captured, rebuild
from pipedream.capture.loss import Loss
from pipedream.capture.segment import Segment, freeze_constants, segment
from pipedream.runtime.data.reader import Batch
from pipedream.runtime.engine.randomness import MinibatchRng, operator_positions, seed_each
from pipedream.runtime.selfcheck.fingerprint import Fingerprint, fingerprint


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
    autocast: str | None
    scale: float


def expected(
    captured: Captured,
    batches: Mapping[int, Batch],
    replicas: Mapping[str, int],
    settings: Settings,
    tolerance: Tolerance,
) -> dict[str, Expected]:
    """The figures of a round: losses, mean gradients, and buffers after it.

    `captured`: for such minibatches; `batches`: by number, in the order of the round; the b-th of
    them changes a buffer of replica b mod r, r being its stage's number of `replicas`.
    """
    with _whole(captured, settings.rng) as piece:
        serial = _Serial(captured, piece, replicas, settings)
        for position, (number, batch) in enumerate(batches.items()):
            serial.run(position, number, batch.to(settings.rng.device))
    parts = len(batches) * settings.scale
    figures = {
        **serial.losses,
        **{gradient_of(name): each / parts for name, each in serial.sums.items()},
    }
    found = {
        what: Expected(fingerprint(each), tolerance.most(what, each))
        for what, each in figures.items()
    }
    for (name, replica), each in serial.buffers.items():
        most = tolerance.most(buffer_of(name), each)
        found[buffer_on(name, replica)] = Expected(fingerprint(each), most)
    return found


@contextmanager
def _whole(captured: Captured, rng: MinibatchRng) -> Iterator[Segment]:
    """The model as one piece, on the device of the run inside the context."""
    where = {name: each.device for name, each in captured.module.named_parameters()}
    piece = segment(captured, captured.working, keep=captured.outputs)
    freeze_constants(piece.to(rng.device), captured.owner)
    try:
        yield seed_each(piece, operator_positions(captured.module), rng)
    finally:
        for name, parameter in captured.module.named_parameters():
            parameter.data = parameter.data.to(where[name])


class _Serial:
    """`buffers`: by name and replica, once the replica has had a minibatch."""

    def __init__(
        self,
        captured: Captured,
        piece: Segment,
        replicas: Mapping[str, int],
        settings: Settings,
    ) -> None:
        self.captured, self.piece, self.replicas = captured, piece, replicas
        self.settings = settings
        self.losses: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.buffers: dict[tuple[str, int], Tensor] = {}
        self.learned = {n: p for n, p in piece.module.named_parameters() if p.requires_grad}

    def run(self, position: int, number: int, batch: Batch) -> None:
        """The passes of a minibatch."""
        settings, settings.rng.minibatch = self.settings, number
        known = dict(zip(self.captured.inputs, batch.inputs, strict=False))
        with lowered(settings.autocast, settings.rng.device), torch.enable_grad():
            results = functional_call(
                self.piece.module,
                self._buffers(position),
                tuple(known[name] for name in self.piece.inputs),
            )
            known |= zip(self.piece.outputs, results, strict=True)
            returned = [known[name] for name in self.captured.outputs]
            loss = settings.loss(rebuild(returned, self.captured.out_spec), batch.target)
        self.losses[loss_of(number)] = loss.detach()
        self._add(loss * settings.scale)

    def _add(self, loss: Tensor) -> None:
        if not loss.requires_grad or not self.learned:
            return
        found = torch.autograd.grad(loss, list(self.learned.values()), allow_unused=True)
        for name, gradient in zip(self.learned, found, strict=True):
            if gradient is not None:
                known = self.sums.get(name)
                self.sums[name] = gradient if known is None else known + gradient

    def _buffers(self, position: int) -> dict[str, Tensor]:
        """Those that the pass of this minibatch reads and writes."""
        own: dict[str, Tensor] = {}
        for name, buffer in self.piece.module.named_buffers():
            if name in self.replicas:
                key = name, position % self.replicas[name]
                own[name] = self.buffers.setdefault(key, buffer.detach().clone())
        return own
