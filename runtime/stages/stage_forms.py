"""One stage in the forms that its minibatches need, of which each has shapes of its own."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipedream.capture.captured import Captured, flatten_inputs
from pipedream.capture.checks.equivalence import Tolerance, any_loss, check_equivalence
from pipedream.capture.compute_settings import Precision
from pipedream.capture.export import capture
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.stages.divided_stage import DividedStage
from pipedream.runtime.stages.randomness import MinibatchRng
from pipedream.runtime.stages.stage_module import StageModule, difference

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
        """The tensors, in the order of `Captured.inputs`."""
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
        slices = [slice(i, i + each) for i in range(0, size, each)]
        return [Call(*part_of((self.args, self.kwargs), which)) for which in slices]


def part_of(tree: Any, which: slice) -> Any:
    """Returns these examples of all tensors in `tree`."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[which], tree)


class Peeking(Protocol):
    """Data of which one can know what a minibatch is like before its turn."""

    def peek(self, minibatch: int) -> Batch: ...


@dataclass(eq=False)
class CapturedStages:
    """The stages of `plan` that a rank runs, of a `model` captured as it is, or in eval mode, when
    a kind of minibatch first comes.

    `texts`: what each kind of minibatch was captured as. `originals`: by stage the form whose
    buffers the others share. Raises UserError where a kind of minibatch makes another model of it
    than the one that was planned.

    `checked`: whether each is compared with the model, from which then a `tolerance` is known.
    `mesh_device`: which device of its stage's mesh this rank is; `divided`: its stages on meshes,
    where originals are made here.
    """

    model: nn.Module
    plan: Plan
    stages: Sequence[int]
    rng: MinibatchRng
    precision: Precision
    training: bool = True
    backend: str | None = None
    first: Captured | None = None
    originals: dict[int, StageModule] = field(default_factory=dict)
    forms: dict[Kind, dict[int, StageModule]] = field(default_factory=dict)
    texts: dict[Kind, str] = field(default_factory=dict)
    checked: bool = False
    captures: dict[Kind, Captured] = field(default_factory=dict)
    tolerance: Tolerance | None = None
    data: Peeking | None = None
    mesh_device: int = 0
    divided: dict[int, DividedStage] = field(default_factory=dict)
    known: dict[int, dict[int, StageModule]] = field(default_factory=dict)

    def begin(self, data: Peeking) -> None:
        """Says that from now on minibatches are those of these data, by their numbers."""
        if data is not self.data:
            self.data, self.known = data, {}

    def of_minibatch(self, minibatch: int) -> dict[int, StageModule]:
        """Returns the stages for a minibatch of the data; once asked for by one stage, for all."""
        if minibatch not in self.known:
            assert self.data is not None
            self.known[minibatch] = self.of(Call(self.data.peek(minibatch).inputs, {}))
        return self.known[minibatch]

    def of(self, call: Call) -> dict[int, StageModule]:
        """Returns the stages for calls of this kind, by number."""
        if call.kind not in self.forms:
            with _on_cpu(self.model):
                model, args, kwargs = self.model, call.args, call.kwargs
                captured = capture(model, args, kwargs, self.training, self.precision)
                if self.checked:
                    tolerance = check_equivalence(model, captured, args, kwargs, any_loss)
                    self.tolerance = self.tolerance or tolerance
            if self.first is None:
                self.first = captured
            elif reason := difference(self.first, captured, self.plan):
                shapes = ", ".join(str(list(tensor.shape)) for tensor in call.tensors)
                raise UserError(f"for inputs {shapes} the model differs: {reason}")
            self.captures[call.kind] = captured
            self.texts[call.kind] = _text(captured)
            self.forms[call.kind] = {stage: self._form(captured, stage) for stage in self.stages}
        return self.forms[call.kind]

    def _form(self, captured: Captured, stage: int) -> StageModule:
        form = StageModule.of(captured, self.plan, stage, self.rng, self.backend)
        buffers = [name for name, _ in self.model.named_buffers()]
        if stage not in self.originals and self.plan.stages[stage].mesh is not None:
            names = {*buffers, *(name for name, _ in self.model.named_parameters())}
            self.divided[stage] = DividedStage.of(
                form, captured, self.plan, self.mesh_device, names
            )
        original = self.originals.setdefault(stage, form)
        form.join_mesh(original)
        form.share(original, buffers)
        return form


@dataclass(frozen=True)
class StageForms:
    """One stage. `usual`: the form for all minibatches but the `others`, by number. With `captured`
    it depends on what the data of a segment are like.
    """

    usual: StageModule
    others: Mapping[int, StageModule] = field(default_factory=dict)
    captured: CapturedStages | None = None

    @staticmethod
    def of_each(forms: Sequence[StageModule]) -> StageForms:
        """Returns the form of each minibatch, in their order."""
        return StageForms(forms[0], dict(enumerate(forms)))

    def begin(self, data: Peeking) -> None:
        """Called with the minibatches of a segment, before it begins."""
        if self.captured is not None:
            self.captured.begin(data)

    def of(self, minibatch: int) -> StageModule:
        if self.captured is not None:
            return self.captured.of_minibatch(minibatch)[self.usual.interface.stage]
        return self.others.get(minibatch, self.usual)


@contextmanager
def _on_cpu(model: nn.Module) -> Iterator[None]:
    """Has the whole model in one place, where the rank's own stages are on a GPU by now."""
    places = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    for tensor, data in places:
        tensor.data = data.cpu()
    try:
        yield
    finally:
        for tensor, data in places:
            tensor.data = data


def _text(captured: Captured) -> str:
    """Returns all that stages and messages are made of, but for the values of tensors."""
    values = [(v.name, v.shape, v.dtype, v.requires_grad) for v in captured.values.values()]
    learn = [(name, p.requires_grad) for name, p in captured.module.named_parameters()]
    return f"{captured.module.code}{values}{learn}"
