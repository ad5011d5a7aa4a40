"""Minibatches on their way to a GPU, beside the passes of those before."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipedream.runtime.data.batch import Batch


@dataclass(frozen=True)
class ComingBatch:
    """A minibatch in memory of a GPU, which has it when `copied`."""

    batch: Batch
    copied: torch.cuda.Event

    def arrived(self) -> Batch:
        """Returns it, for passes on the current stream, which waits for the copy; the host does
        not.
        """
        stream = torch.cuda.current_stream(self.copied.device)
        stream.wait_event(self.copied)
        for tensor in self.batch.tensors:  # else its memory would be the next copy's once it is
            tensor.record_stream(stream)  # freed here, where passes may be yet to come
        return self.batch


class DeviceCopies:
    """Copies to a GPU, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Batch) -> ComingBatch:
        """Begins to copy a minibatch of the host. Its page-locked memory is not used again before
        the copy is done: torch's allocator sees to that.
        """
        pinned = batch.pin_memory()
        with torch.cuda.stream(self.stream):
            copied = pinned.to(self.device, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self.stream)
        return ComingBatch(copied, done)
