"""Selective recomputation: some nodes of a stage run again for its backward pass.

What they make is not kept meanwhile, whoever needs it: neither what they save themselves, nor their
outputs that other nodes save. What they read and others make is kept. As in Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), with any set of nodes.

Adjacent ones run again together, when a backward pass first needs something that they have made,
and what it has used is given up, so that not much of it is there at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from pipedream.capture.compute_settings import Precision
from pipedream.capture.module_tensors import ModuleTensors
from pipedream.capture.rewrites.node_runs import NodeRun, node_runs
from pipedream.capture.segment import Segment
from pipedream.graph.errors import UserError
from pipedream.runtime.stages.randomness import MinibatchRng

Storage: TypeAlias = int
"""The identity of a storage, while it or a weak reference to it lives."""


def refuse_selective(stage: int, compiled: object, recorded: object = False) -> None:
    """Raises UserError if a stage that recomputes some nodes, or moves what it saves to the host,
    is `compiled`, or its passes are `recorded`.
    """
    if compiled or recorded:
        what = "torch.compile" if compiled else "a recording of its passes"
        raise UserError(
            f"stage {stage}: the plan recomputes single nodes or offloads activations, which does"
            f" not go with {what}: plan with --recompute whole"
        )


class SelectiveRun:
    """Runs the module of a stage so that `nodes` of its graph, which `owner` gives for operators,
    run again for the backward pass.
    """

    def __init__(
        self,
        piece: Segment,
        nodes: Collection[str],
        owner: Mapping[str, str],
        rng: MinibatchRng,
        precision: Precision,
    ) -> None:
        def again(node: fx.Node) -> bool:
            return owner.get(node.name) in nodes

        self.piece, self.rng, self.precision = piece, rng, precision
        self.state = ModuleTensors.of(piece.module)
        self.written = frozenset(piece.written_buffers)
        self.runs = node_runs(piece.module, again)

    def __call__(self, tensors: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> Any:
        values = dict(zip(self.piece.inputs, inputs, strict=True))
        made = _Made()
        for run in self.runs:
            state = {name: self.state.find(name, tensors) for name in run.state}
            given = [values[name] for name in run.inputs]
            if run.marked and torch.is_grad_enabled():
                results = self._first(run, made, given, state)
            else:
                with saved_tensors_hooks(made.keep, _unpack):
                    results = run.module(*given, *state.values())
            del given
            values.update(zip(run.outputs, results, strict=True))
            for name in run.unread:
                del values[name]
            del results
        made.known.clear()  # autograd holds on to the hooks, and these must not hold the runs
        return tuple(values[name] for name in self.piece.outputs)

    def _first(
        self, run: NodeRun, made: _Made, given: Sequence[Tensor], state: Mapping[str, Tensor]
    ) -> Sequence[Tensor]:
        """Runs for the first time what is to run again."""
        before = {
            name: tensor.clone() if name in self.written else tensor
            for name, tensor in state.items()
        }
        own = {storage_of(tensor) for tensor in state.values()}
        inputs = [made.input(tensor, own) for tensor in given]
        setting = self._setting(self.rng.epoch, self.rng.minibatch)
        again = _RunAgain(made.count, run, inputs, before, self.written, setting)
        made.count += 1
        return again.first(made, given, state)

    def _setting(self, epoch: int, minibatch: int) -> _Setting:
        """Returns a context as that of a forward pass of this minibatch."""
        rng, precision = self.rng, self.precision

        @contextmanager
        def setting() -> Iterator[None]:
            now = rng.epoch, rng.minibatch
            rng.epoch, rng.minibatch = epoch, minibatch
            try:
                with torch.enable_grad(), precision.computing():
                    yield
            finally:
                rng.epoch, rng.minibatch = now
                if precision.autocast is not None:
                    torch.clear_autocast_cache()

        return setting


_Setting: TypeAlias = Callable[[], Any]


class _Output(NamedTuple):
    """A view of an output of a run, which comes when it runs again."""

    run: _RunAgain
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool

    def get(self) -> Tensor:
        output = self.run.output(self.number)
        return output.as_strided(self.size, self.stride, self.offset)


class _Saved(NamedTuple):
    """A tensor that an operator of a run saves, as the so-and-so-many-th."""

    run: _RunAgain
    number: int

    def get(self) -> Tensor:
        return self.run.saved_tensor(self.number)


_Packed: TypeAlias = Tensor | _Output | _Saved


def _unpack(packed: _Packed) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.get()


class _Made:
    """The outputs of runs of a forward pass that will run again, by their storage."""

    def __init__(self) -> None:
        self.count = 0
        self.known: dict[Storage, tuple[StorageWeakRef, _RunAgain, int, torch.dtype]] = {}

    def find(self, tensor: Tensor) -> _Output | None:
        """Returns where a tensor comes from, if it will be made again."""
        known = self.known.get(storage_of(tensor))
        if known is None or known[3] != tensor.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        _, run, number, _ = known
        run.uses[number] += 1
        shape = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return _Output(run, number, *shape, tensor.requires_grad)

    def keep(self, tensor: Tensor) -> _Packed:
        return self.find(tensor) or tensor

    def input(self, tensor: Tensor, state: Collection[Storage]) -> Tensor | _Output:
        """Returns what stands for an input of a run until it runs again."""
        found = None if storage_of(tensor) in state else self.find(tensor)
        return found or tensor.detach().requires_grad_(tensor.requires_grad)

    def add(self, run: _RunAgain, outputs: Sequence[Tensor], others: Collection[Storage]) -> None:
        """Takes note of outputs, except those in the memory of other tensors."""
        for number, tensor in enumerate(outputs):
            storage = storage_of(tensor)
            if storage not in others and storage not in self.known:
                weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self.known[storage] = weak, run, number, tensor.dtype


def storage_of(tensor: Tensor) -> Storage:
    """Returns where a tensor lies."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(eq=False)
class _RunAgain:
    """A run of one minibatch. `order`: among those of its pass; `inputs` and `state` are what it
    reads; it may write the buffers `written`. `uses`: how often each output is needed; `wanted`:
    which saved tensors are.

    While it has run again: `outputs` and `saved` that are still to be used, `left` as `uses`.
    """

    order: int
    run: NodeRun
    inputs: Sequence[Tensor | _Output]
    state: Mapping[str, Tensor]
    written: Collection[str]
    setting: _Setting
    uses: Counter[int] = field(default_factory=Counter)
    wanted: set[int] = field(default_factory=set)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    left: Counter[int] = field(default_factory=Counter)
    saved: dict[int, Tensor] = field(default_factory=dict)

    def first(
        self, made: _Made, given: Sequence[Tensor], state: Mapping[str, Tensor]
    ) -> Sequence[Tensor]:
        """Runs for the first time, and adds to what has been `made`."""
        held = {storage_of(tensor) for tensor in (*given, *state.values())}
        numbers = count()

        def pack(tensor: Tensor) -> _Packed:
            number = next(numbers)
            if storage_of(tensor) in held:
                return made.keep(tensor)
            self.wanted.add(number)
            return _Saved(self, number)

        with saved_tensors_hooks(pack, _unpack):
            outputs: Sequence[Tensor] = self.run.module(*given, *state.values())
        made.add(self, outputs, held)
        return outputs

    def output(self, number: int) -> Tensor:
        if number not in self.outputs:
            self._run()
        tensor = self.outputs[number]
        self.left[number] -= 1
        if not self.left[number]:
            del self.outputs[number]
        return tensor

    def saved_tensor(self, number: int) -> Tensor:
        if number not in self.saved:
            self._run()
        return self.saved.pop(number)

    def _run(self) -> None:
        """Runs again, after those whose outputs it needs, one after the other: a chain of them may
        be longer than calls may be nested.
        """
        waiting, seen = [self], {self}
        while waiting:
            read = (each for each in waiting.pop().inputs if isinstance(each, _Output))
            missing = {each.run for each in read if each.number not in each.run.outputs} - seen
            seen |= missing
            waiting += missing
        for run in sorted(seen, key=lambda each: each.order):
            run._run_once()

    def _run_once(self) -> None:
        saved: dict[int, Tensor] = {}
        numbers = count()

        def pack(tensor: Tensor) -> None:
            number = next(numbers)
            if number in self.wanted:
                saved[number] = tensor.detach()

        given = [
            each if isinstance(each, Tensor) else each.get().requires_grad_(each.requires_grad)
            for each in self.inputs
        ]
        state = [  # which the run writes, and it may have to run once more
            tensor.clone() if name in self.written else tensor
            for name, tensor in self.state.items()
        ]
        with self.setting(), saved_tensors_hooks(pack, _unpack):
            outputs = self.run.module(*given, *state)
        self.saved, self.left = saved, Counter(self.uses)
        self.outputs = {n: outputs[n].detach() for n in self.uses}
