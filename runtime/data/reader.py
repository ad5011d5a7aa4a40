"""The minibatches of an epoch: which examples, in which order, the same on every rank.

Every rank that needs them reads them ahead, beside the computation.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from pipedream.capture.sources.minibatch import Dataset
from pipedream.comm.device.threads import start_thread
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import RunConfig
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.data.device_copies import ComingBatch, DeviceCopies
from pipedream.runtime.data.order import Sizes, shuffled
from pipedream.runtime.supervise.launch import ASKING

_HANDING_OVER = 3e-4
"""Seconds that a minibatch costs at least if a thread reads it, besides reading: two threads of
Python wait for each other. README's model takes 10.2 ms with a thread, 7.5 ms without."""

_SLOW_READS = 3
"""So many in a row that take longer are read by a thread from then on."""


class DataLost(RuntimeError):
    """A process that reads data has died. It is not a worker, so a restart may help."""


class Epoch:
    """One pass over a dataset in minibatches of equal size, except the last.

    The order depends on the seed and `number` alone, so every rank that needs a minibatch makes it
    for itself: stages that read an input of the model, and the last stage for the target. With
    `drop_last` the examples that do not fill a minibatch are skipped, different ones in each epoch.
    `order` has the indices of the examples, if they are not simply all, shuffled. `kind`: what all
    minibatches have to be, if known. `draws`: the dataset uses torch's random numbers.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: RunConfig,
        number: int,
        device: torch.device,
        kind: str | None = None,
        draws: bool = True,
        order: Sequence[int] | None = None,
    ) -> None:
        self.dataset, self.config, self.number = dataset, config, number
        self.device, self.kind, self.draws = device, kind, draws
        self.order = shuffled(len(dataset), config.seed, number) if order is None else order

    def __len__(self) -> int:
        """The number of minibatches."""
        return len(Sizes(len(self.order), self.config.batch_size, self.config.drop_last))

    @contextmanager
    def _random(self, minibatch: int) -> Iterator[None]:
        """What the dataset draws in here depends on the minibatch alone, whoever reads it."""
        key = (self.config.seed * 1_000_003 + self.number) * 1_000_003 + minibatch
        random.seed(key)
        np.random.seed(key % 2**32)
        if not self.draws:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key % 2**63)
            yield

    def batch(self, minibatch: int) -> Batch:
        """Returns a minibatch on the CPU. Raises UserError if it is not of the same kind."""
        size = self.config.batch_size
        chosen = self.order[minibatch * size : (minibatch + 1) * size]
        with self._random(minibatch):
            batch = Batch.of(self.dataset, chosen, self.config)
        if batch.kind != (self.kind or batch.kind):
            raise UserError(
                f"{self.config.data.source}: the inputs of an example in minibatch {minibatch} are "
                f"{batch.kind}, in the first {self.kind}: all have to have the same shape and type"
            )
        return batch


class Reader:
    """A context manager that reads the minibatches a rank will ask for ahead, in that order.

    A thread reads them, or `data_workers` processes. Each is read when it is asked for as long as
    that takes less than to hand it over, and if the dataset uses torch's random numbers, or
    minibatches vary in shape: it cannot be a thread then, for the model uses the same random
    numbers, and a capture looks whether the model draws from Python's or numpy's, which reading
    seeds.

    To a GPU each is copied one ahead: when the one before is asked for.
    """

    def __init__(
        self, epoch: Epoch, minibatches: Sequence[int], targets_only: bool = False
    ) -> None:
        """With `targets_only` no inputs are kept: who reads is in the last stage, and in no other
        that reads them.
        """
        self.last: tuple[int, Batch] | None = None
        self.ahead: dict[int, Batch | BaseException] = {}
        self.device, self.numbers = epoch.device, deque(minibatches)
        self.copies = DeviceCopies(self.device) if self.device.type == "cuda" else None
        self.coming_batch: ComingBatch | None = None
        listed = _Listed(epoch, minibatches, targets_only)
        workers = epoch.config.data_workers
        self.close: Callable[[], None] = lambda: None
        if workers and minibatches:
            self.coming: Iterator[Batch | BaseException] = _by_processes(
                listed, workers, self.copies is not None
            )
        elif epoch.draws or epoch.config.data.varying:
            self.coming = iter(listed)
        else:
            ahead = _Ahead(listed)
            self.coming, self.close = ahead.batches(), ahead.close

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is None:  # else this process ends, and does not wait for those that may be stuck
            self.coming = iter(())  # the processes end with the loader

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[Tensor]:
        """Returns the input tensors at these positions. Raises UserError if one is missing."""
        wanted = list(which)
        if not wanted:
            return []
        tensors = self._batch(minibatch).inputs
        if max(wanted) >= len(tensors):
            raise UserError(
                f"the model takes {max(wanted) + 1} inputs and the data gives {len(tensors)}"
            )
        return [tensors[position] for position in wanted]

    def target(self, minibatch: int) -> Any:
        return self._batch(minibatch).target

    def peek(self, minibatch: int) -> Batch:
        """Returns a minibatch to be asked for later, on the CPU; it and those before are kept."""
        while minibatch not in self.ahead:
            _known(self._read())
        return _known(self.ahead[minibatch])

    def _batch(self, minibatch: int) -> Batch:
        """Keeps the last one, since a stage may read the inputs and then the target."""
        if self.last is None or self.last[0] != minibatch:
            if not self.ahead:
                self._read()
            first = next(iter(self.ahead))
            assert first == minibatch, "minibatches are asked for in the order given"
            batch = _known(self.ahead.pop(minibatch))
            self.last = minibatch, batch if self.copies is None else self._copied(batch)
        return self.last[1]

    def _copied(self, batch: Batch) -> Batch:
        """Returns it on the GPU, and begins to copy the next one."""
        assert self.copies is not None
        coming = self.coming_batch or self.copies.begin(batch)
        arrived, self.coming_batch = coming.arrived(), None
        if not self.ahead and self.numbers:
            self._read()
        following = next(iter(self.ahead.values()), None)
        if isinstance(following, Batch):
            self.coming_batch = self.copies.begin(following)
        return arrived

    def _read(self) -> Batch | BaseException:
        """Reads the next one and keeps it; what goes wrong is raised where it is asked for."""
        batch: Batch | BaseException
        try:
            batch = next(self.coming)
        except Exception as error:
            batch = error
        self.ahead[self.numbers.popleft()] = batch
        return batch


def _known(batch: Batch | BaseException) -> Batch:
    if isinstance(batch, BaseException):
        raise batch
    return batch


@dataclass(frozen=True)
class _Listed(TorchDataset[Any]):
    """Some minibatches of an epoch, on the CPU; in the place of one the error that it raised."""

    epoch: Epoch
    minibatches: Sequence[int]
    targets_only: bool = False

    def __len__(self) -> int:
        return len(self.minibatches)

    def __getitem__(self, index: int) -> Batch | UserError:
        if index >= len(self):
            raise IndexError(index)
        try:
            batch = self.epoch.batch(self.minibatches[index])
            return replace(batch, inputs=()) if self.targets_only else batch
        except UserError as error:
            return error


def _by_processes(listed: _Listed, workers: int, pinned: bool) -> Iterator[Batch | BaseException]:
    """Yields what that many processes make of `listed`, in its order, in page-locked memory if
    `pinned`. Raises DataLost.
    """
    workers = min(workers, len(listed))
    loader = DataLoader(
        listed, batch_size=None, num_workers=workers, worker_init_fn=_go_on, pin_memory=pinned
    )
    loaded = iter(loader)
    # Torch's handler raises wherever the main thread is when one dies, in a pass or a message. The
    # loader looks for itself whether they live.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def checked() -> Iterator[Batch | BaseException]:
        try:
            yield from loaded
        except (RuntimeError, OSError, EOFError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataLost(reason) from error

    return checked()


def _go_on(_worker: int) -> None:
    """Ignores stop signals: data processes get them too, but the rank needs their data to drain."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)


class _Ahead:
    """What `listed` has: from where reading takes long on, read by a thread a little before it is
    asked for.
    """

    def __init__(self, listed: _Listed) -> None:
        self.listed = listed
        self.queue: Queue[Batch | BaseException] = Queue(2)
        self.ended = threading.Event()

    def batches(self) -> Iterator[Batch | BaseException]:
        slow, number = 0, 0
        while slow < _SLOW_READS and number < len(self.listed):
            begin = time.perf_counter()
            batch = self.listed[number]
            slow = slow + 1 if time.perf_counter() - begin > _HANDING_OVER else 0
            number += 1
            yield batch
        start_thread(partial(self._make, number), "data", self.listed.epoch.device)
        while True:
            yield self.queue.get()

    def _make(self, first: int) -> None:
        for index in range(first, len(self.listed)):
            if self.ended.is_set():
                return
            try:
                batch = self.listed[index]
                if isinstance(batch, Batch) and self.listed.epoch.device.type == "cuda":
                    batch = batch.pin_memory()
                self.queue.put(batch)
            except BaseException as error:  # raised where it is asked for
                self.queue.put(error)
                return

    def close(self) -> None:
        """Ends the thread after what it reads now, without waiting: that may never come."""
        self.ended.set()
        with suppress(Empty):
            while True:
                self.queue.get_nowait()  # it may be waiting for room


def in_order(dataset: Dataset, config: RunConfig, device: torch.device) -> Iterator[Batch]:
    """Yields all examples of a dataset once, in order; the last minibatch may be smaller."""
    size = config.batch_size
    for begin in range(0, len(dataset), size):
        batch = Batch.of(dataset, range(begin, min(begin + size, len(dataset))), config)
        yield batch.to(device)
