"""One stage in as many forms as its minibatches have shapes, captured when one first comes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipedream.capture.export import Captured, capture, flatten_inputs
from pipedream.capture.segment import Segment
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan
from pipedream.runtime.engine.randomness import MinibatchRng, operator_positions, seed_each
from pipedream.runtime.stages.partition import interfaces
from pipedream.runtime.stages.stage_module import Compute, StageModule, difference, make_compute

Kind: TypeAlias = Hashable
"""What two calls of a model have to have in common for the same operators to run: the shapes and
types of their tensors, and the values of everything else."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.tensors[0])

    @property
    def tensors(self) -> list[Tensor]:
        """In the order of `Captured.inputs`."""
        return flatten_inputs(self.args, self.kwargs)

    @property
    def kind(self) -> Kind:
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        kinds = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves]
        return str(spec), tuple(kinds)

    def split(self, parts: int) -> list[Call]:
        """Cuts the first dimension of all tensors into at most so many parts, the last of which may
        be smaller. Raises UserError if tensors differ in it.
        """
        sizes = {len(tensor) if tensor.dim() else 0 for tensor in self.tensors}
        if len(sizes) != 1 or 0 in sizes:
            raise UserError(
                "the inputs of a minibatch have to have its examples as their first dimension, and "
                f"have {', '.join(str(list(x.shape)) for x in self.tensors) or 'no tensors'}"
            )
        (size,) = sizes
        each = -(-size // parts)
        return [self.part(slice(i, i + each)) for i in range(0, size, each)]

    def part(self, which: slice) -> Call:
        return Call(*part_of((self.args, self.kwargs), which))


def part_of(tree: Any, which: slice) -> Any:
    """These examples of all tensors in `tree`."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[which], tree)


@dataclass(eq=False)
class StageForms:
    """The stages of `plan` that a rank runs, of a `model` captured in training or eval mode.

    All ranks ask for the same kinds in the same order. Raises UserError where a kind of minibatch
    makes another model of it than the one that was planned.
    """

    model: nn.Module
    plan: Plan
    stages: Sequence[int]
    rng: MinibatchRng
    autocast: str | None = None
    training: bool = True
    first: Captured | None = None
    forms: dict[Kind, dict[int, StageModule]] = field(default_factory=dict)

    def of(self, call: Call) -> dict[int, StageModule]:
        """The stages for calls of this kind, by number."""
        if call.kind not in self.forms:
            with self._all_on_cpu():
                captured = capture(self.model, call.args, call.kwargs, self.training)
            if self.first is None:
                self.first = captured
            elif told := difference(self.first, captured, self.plan):
                raise UserError(f"for inputs {_shapes(call)} the model differs: {told}")
            self.forms[call.kind] = {stage: self._form(captured, stage) for stage in self.stages}
        return self.forms[call.kind]

    def _form(self, captured: Captured, stage: int) -> StageModule:
        def compute(captured: Captured, piece: Segment) -> Compute:
            seed_each(piece, operator_positions(captured.module), self.rng)
            return make_compute(piece, self.rng.device, self.autocast)

        interface = interfaces(captured, self.plan)[stage]
        form = StageModule.of(captured, interface, self.rng.device, compute)
        for other in self.forms.values():
            form.share(other[stage], [name for name, _ in self.model.named_buffers()])
            break
        return form

    @contextmanager
    def _all_on_cpu(self) -> Iterator[None]:
        """Has the whole model in one place, where the rank's own stages are on a GPU by now."""
        own = [form.piece.module for forms in self.forms.values() for form in forms.values()]
        for module in own:
            module.to("cpu")
        yield
        for module in own:
            module.to(self.rng.device)


@dataclass(frozen=True)
class ByMinibatch:
    """The form of one stage for each minibatch, by its number."""

    stage: int
    forms: Sequence[Mapping[int, StageModule]]

    def of(self, minibatch: int) -> StageModule:
        return self.forms[minibatch][self.stage]


def _shapes(call: Call) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in call.tensors)
