"""Activations of minibatches in flight in the memory of the host.

What a forward pass saves is copied out beside the passes that follow, and brought back beside the
pass before the backward pass that needs it. A device then holds what two minibatches have saved,
however many are in flight, as long as the copies keep up; it waits for them where they do not. As
in Rhu et al., "vDNN" (2016), with whole stages in place of layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from pipedream.runtime.stages.selective import Storage, storage_of


class Copied(Protocol):
    """A copy under way."""

    def synchronize(self) -> None:
        """Waits on the host until it is done."""

    def wait(self) -> None:
        """Makes the device's current stream wait for it."""


class Copier(Protocol):
    """Copies bytes between device and host; what it is given must live until that is done."""

    def out(self, tensor: Tensor) -> tuple[Tensor, Copied | None]: ...

    def back(self, tensor: Tensor) -> tuple[Tensor, Copied | None]: ...


class HostCopier:
    """Where the device is the host: copies, from which nothing is gained."""

    def out(self, tensor: Tensor) -> tuple[Tensor, Copied | None]:
        return tensor.clone(), None

    def back(self, tensor: Tensor) -> tuple[Tensor, Copied | None]:
        return tensor.clone(), None


class CudaCopier:
    """Copies on two streams, one for each direction, through page-locked memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.leaving, self.coming = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def out(self, tensor: Tensor) -> tuple[Tensor, Copied | None]:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return self._copy(tensor, target, self.leaving)

    def back(self, tensor: Tensor) -> tuple[Tensor, Copied | None]:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return self._copy(tensor, target, self.coming)

    def _copy(
        self, tensor: Tensor, target: Tensor, stream: torch.cuda.Stream
    ) -> tuple[Tensor, Copied | None]:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        return target, done


@dataclass(eq=False)
class _Activation:
    """What lies in one storage: on the `device`, as `host` copy, or both; `uses`: how many saved
    tensors lie in it and are still needed.
    """

    copier: Copier
    device: Tensor | None
    host: Tensor | None = None
    copied: Copied | None = None
    fetched: Copied | None = None
    uses: int = 0

    def leave(self) -> None:
        assert self.device is not None
        self.host, self.copied = self.copier.out(self.device)

    def left(self) -> None:
        """Gives up the memory on the device, once its contents are on the host."""
        if self.copied is not None:
            self.copied.synchronize()
        self.device = None

    def fetch(self) -> None:
        if self.device is None and self.uses:
            assert self.host is not None
            self.device, self.fetched = self.copier.back(self.host)

    def take(self) -> Tensor:
        """Returns the bytes on the device, for one of the saved tensors."""
        self.fetch()
        if self.fetched is not None:
            self.fetched.wait()
        device = self.device
        assert device is not None
        self.uses -= 1
        if not self.uses:
            self.device = None
            if self.copied is not None:  # the host's memory is not to be used again before
                self.copied.synchronize()
        return device


class _SavedInHost(NamedTuple):
    """A saved tensor, as a view of what lies in a storage."""

    activation: _Activation
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor:
        bytes_ = self.activation.take()
        tensor = torch.empty(0, dtype=self.dtype, device=bytes_.device)
        storage = bytes_.untyped_storage()
        return tensor.set_(storage, self.offset, self.size, self.stride)


def _get(packed: Tensor | _SavedInHost) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.get()


class OffloadedActivations:
    """The saved activations of one stage's minibatches in flight on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.copier: Copier = CudaCopier(device) if device.type == "cuda" else HostCopier()
        self.of_minibatch: dict[int, list[_Activation]] = {}
        self.leaving: deque[list[_Activation]] = deque()
        self.coming: int | None = None

    def begin_pass(self, minibatch: int, backward: bool, coming: int | None) -> None:
        """Called before each pass; `coming`: the minibatch of the pass after it, if that is a
        backward pass.
        """
        self.coming = coming
        if backward:
            self.of_minibatch.pop(minibatch, None)
        needed = set() if coming is None else set(self.of_minibatch.get(coming, ()))
        # Those of the pass before have a pass's time to leave, unless others arrive meanwhile.
        while len(self.leaving) > (backward or not needed):
            for activation in self.leaving.popleft():
                if activation not in needed and activation.uses:
                    activation.left()
        self.leaving.append([])
        for activation in needed:
            activation.fetch()

    @contextmanager
    def saving(self, minibatch: int, held: Iterable[Tensor]) -> Iterator[None]:
        """What is saved inside moves to the host, except what is `held` anyway, and all of a
        minibatch whose backward pass comes next.
        """
        if self.coming == minibatch:
            yield
            return
        others = {storage_of(tensor) for tensor in held}
        known: dict[Storage, tuple[StorageWeakRef, _Activation]] = {}
        own = self.of_minibatch[minibatch] = []

        def pack(tensor: Tensor) -> Tensor | _SavedInHost:
            storage = storage_of(tensor)
            if storage in others or tensor.is_conj() or tensor.is_neg():
                return tensor
            if storage not in known:
                activation = _Activation(self.copier, _bytes_of(tensor))
                activation.leave()
                own.append(activation)
                weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                known[storage] = weak, activation
            _, activation = known[storage]
            activation.uses += 1
            shape = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            return _SavedInHost(activation, tensor.dtype, *shape)

        with saved_tensors_hooks(pack, _get):
            yield
        known.clear()
        self.leaving[-1].extend(own)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns the whole storage in which a tensor lies, as bytes."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))
