"""Each kind of pass once, with made-up messages, before ranks wait for one another.

What a GPU does when a pass first runs (kernels that are loaded, chosen and compiled, memory that
the driver gives and takes) waits until nothing is under way on it: so, too, for a receive that was
posted ahead, of a message that its sender makes only after one of this rank's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

from pipedream.capture.checks.equivalence import restore
from pipedream.comm.messages import Message
from pipedream.comm.transport import Sum, TensorSpec, Transport
from pipedream.runtime.engine.forward import ForwardExecutor, Minibatches
from pipedream.runtime.run.action_stream import Lateness
from pipedream.schedule.action import CLOSING, RECEIVES, Action
from pipedream.schedule.channel import Channel


class MadeUpMessages(Transport):
    """Brings zeros at once, of the shapes that are waited for, and sends nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = self.staged = device
        self.is_queued = False
        self.posted: dict[Channel, Sequence[TensorSpec]] = {}

    def post(self, parts: Mapping[Channel, Sequence[TensorSpec]]) -> None:
        self.posted |= parts

    def receive(self, channel: Channel) -> Message:
        return [
            torch.zeros(tuple(value.shape), dtype=value.dtype, device=self.device)
            for value in self.posted[channel]
        ]

    def send(self, parts: Mapping[Channel, Sequence[torch.Tensor]]) -> None:
        pass

    def recycle(self, channel: Channel, message: Message) -> None:
        pass

    def begin_sum(self, flat: torch.Tensor, group: dist.ProcessGroup | None) -> Sum:
        raise AssertionError("a sum before ranks wait for one another")

    def drain(self) -> None:
        pass


def do_once(
    executors: Mapping[int, ForwardExecutor],
    actions: Sequence[Action],
    minibatches: Iterable[int],
    data: Minibatches,
) -> None:
    """Does the passes of these minibatches through each stage of this rank, as each minibatch of
    `actions` has them that has other kinds of passes. The transport of the executors is
    `MadeUpMessages`. Buffers change.

    On a mesh all its devices call it at the same time, with the same minibatches.
    """
    for stage, executor in executors.items():
        for once, minibatch in product(_of_each_kind(actions, stage), minibatches):
            numbered = [action._replace(minibatch=minibatch, version=0) for action in once]
            executor.begin(data)
            executor.follow(numbered, Lateness())
            for action in numbered:
                if action.kind in RECEIVES:
                    executor.post(action)
                executor.table[action.kind](action)
            executor.end()


def _of_each_kind(actions: Sequence[Action], stage: int) -> Iterable[Sequence[Action]]:
    """Returns all of one minibatch, for each set of kinds that a minibatch of the stage has."""
    by_minibatch: dict[int, list[Action]] = {}
    for action in actions:
        if action.stage == stage and action.kind not in CLOSING:
            by_minibatch.setdefault(action.minibatch, []).append(action)
    return {tuple(each.kind for each in own): own for own in by_minibatch.values()}.values()


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Gives the buffers of a module the values they had, after passes that are only tried."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            restore(buffer, value)
