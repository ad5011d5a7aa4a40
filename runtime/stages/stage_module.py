"""A stage as a module that runs minibatches of one size.

A captured model is a sequence of operators on tensors of fixed shapes. If the last minibatch of an
epoch has fewer examples, the model is captured once more for that size, and each stage has a second
module: the same nodes, parameters and buffers, other shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pipedream.capture.captured import Captured, OutSpec, rebuild
from pipedream.capture.compiled import Run, check_backend, compiled, plain
from pipedream.capture.compute_settings import Precision
from pipedream.capture.export import capture
from pipedream.capture.grouped import mark_groups
from pipedream.capture.loss import Loss
from pipedream.capture.programs.attribution import GraphNodes
from pipedream.capture.programs.loss_end import LossEnd
from pipedream.capture.rewrites.fold_norms import FoldedNorms, fold_norms
from pipedream.capture.segment import Segment, freeze_constants
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan, PlannedGraph
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.stages.crossings import Crossings, crossings
from pipedream.runtime.stages.partition import StageInterface, first_difference, interfaces, links
from pipedream.runtime.stages.randomness import MinibatchRng, seed_each
from pipedream.runtime.stages.selective import SelectiveRun, refuse_selective
from pipedream.runtime.stages.stage_program import StageProgram

Compute: TypeAlias = Run
"""What runs the stage's module."""


def make_compute(
    piece: Segment, precision: Precision, backend: str | None, selective: Run | None = None
) -> Compute:
    """Returns what runs the stage's module under these settings; `selective`: if some nodes run
    again for the backward pass.

    Raises UserError for a torch.compile `backend` that does not exist.
    """
    run = selective or plain(piece.module)
    if backend is not None:
        check_backend(backend)
        run = compiled(piece.module, backend, precision.device)

    def compute(tensors: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> Any:
        with precision.computing():
            results = run(tensors, tuple(map(_not_a_leaf, inputs)))
        if precision.autocast is not None:  # inside of a caller's, its casts of weights would stay
            torch.clear_autocast_cache()
        return results

    return compute


def _not_a_leaf(received: Tensor) -> Tensor:
    """Returns another name of a tensor from another stage. Of leaves autocast makes one copy for
    all that read them, in which their gradients would add up in the lower type; in the plain model
    this is no leaf.
    """
    return received.view_as(received) if received.requires_grad else received


@dataclass(frozen=True)
class StageModule:
    """One stage for one size of minibatches; `compute` runs `piece`, and so does `program`, for
    backward passes in halves.

    `outputs`: the names of the values that the model returns, in the structure `out_spec`. `norms`:
    those that are part of their convolutions, to evaluate.
    """

    interface: StageInterface
    piece: Segment
    compute: Compute
    outputs: Sequence[str]
    out_spec: OutSpec
    program: StageProgram
    crossings: Crossings
    norms: FoldedNorms | None = None

    @staticmethod
    def of(
        captured: Captured,
        plan: Plan,
        stage: int,
        rng: MinibatchRng | None = None,
        backend: str | None = None,
    ) -> StageModule:
        """Builds a stage of the plan from `captured`: to train, where its random operators draw
        from `rng`, with torch.compile's `backend`; else to evaluate.

        Raises UserError if the model is not the one that was planned.
        """
        every, precision = interfaces(captured, plan), captured.precision
        interface, ends = every[stage], crossings(captured, plan, every, stage)
        built = interface.build(captured)
        for tensor in (*built.module.parameters(), *built.module.buffers()):
            if tensor.device != precision.device:
                tensor.data = tensor.data.to(precision.device)  # they stay those of the model
        piece = freeze_constants(built.to(precision.device), captured.owner)
        norms = None
        if rng is None:
            if plan.stages[stage].mesh is None:
                norms = fold_norms(piece.module)
            run = plain(piece.module)
        else:
            assert rng.device.type == precision.device.type
            seed_each(piece, captured.module, rng)
            mark_groups(piece.module, captured, interface.nodes, plan.eager_nodes or ())
            planned, selective = plan.stages[stage], None
            if planned.by_autograd:
                refuse_selective(stage, backend)
                if planned.recomputed_nodes:
                    again = planned.recomputed_nodes
                    selective = SelectiveRun(piece, again, captured.owner, rng, precision)
            run = make_compute(piece, precision, backend, selective)
        program = StageProgram(piece, precision, backend, ends, nodes=GraphNodes.of(captured))
        outputs, out_spec = captured.outputs, captured.out_spec
        return StageModule(interface, piece, run, outputs, out_spec, program, ends, norms)

    def evaluated_with(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns what `compute` is to be given to evaluate with these parameters and buffers."""
        return tensors if self.norms is None else {**tensors, **self.norms.values(tensors)}

    def output(self, known: Mapping[str, torch.Tensor]) -> Any:
        """Returns what the model returns, from the values of the last stage by name."""
        return rebuild([known[name] for name in self.outputs], self.out_spec)

    def example(self, captured: Captured) -> dict[str, Tensor]:
        """Returns tensors like those that the stage reads and receives, without contents."""
        read = (captured.values[name] for name in self.interface.reads)
        device = self.program.precision.device
        return {
            value.name: torch.empty(value.shape, dtype=value.dtype, device=device).requires_grad_(
                value.requires_grad
            )
            for value in chain(read, *self.interface.receives.values())
        }

    def end_in(self, loss: Loss) -> None:
        """Makes the programs of the last stage give the loss, where the stage is on a mesh."""
        self.program.loss = LossEnd(loss, self.outputs, self.out_spec)

    def join_mesh(self, original: StageModule) -> None:
        """Has this form of a stage run as its `original` one does if that is on a mesh: with the
        parts of parameters and buffers of the same device, its programs ending in the same loss.
        """
        sharding, loss = original.program.sharding, original.program.loss
        if sharding is None:
            return
        self.program.planned, self.program.sharding = sharding.planned, sharding
        sharding.follow(self.piece.module, original.piece.module)
        if loss is not None:
            self.end_in(loss.loss)

    def share(self, other: StageModule, buffers: Collection[str]) -> None:
        """Makes the two use the same buffers, of those that the model has: `buffers`."""
        for name, buffer in other.piece.module.named_buffers(remove_duplicate=False):
            if name in buffers:
                path, _, attribute = name.rpartition(".")
                setattr(self.piece.module.get_submodule(path), attribute, buffer)


def capture_rest(
    model: nn.Module, batch: Batch, rest: int, whole: Captured, plan: Plan, training: bool = True
) -> Captured:
    """Captures the model for the first `rest` examples of `batch`, as `whole` is for all of it.

    Raises UserError if the model does not accept so few, or its stages would be others.
    """
    inputs = batch.first(rest).inputs
    captured = capture(model, inputs, training=training, precision=whole.precision)
    reason = difference(whole, captured, plan)
    if reason is not None:
        raise UserError(f"the model differs: {reason}")
    return captured


def difference(whole: Captured, other: Captured, plan: Plan) -> str | None:
    """Describes where two captures differ in nodes, parameters or messages; None if they do not."""
    reason = first_difference(PlannedGraph.of(whole.graph), other.graph)
    if reason is not None:
        return reason
    for node, again in zip(whole.graph.order, other.graph.order, strict=True):
        expected = (whole.module_paths[node], *whole.parameters[node])
        if expected != (other.module_paths[again], *other.parameters[again]):
            return f"{again} ({other.graph.nodes[again].description}) is of another module"
    if links(interfaces(whole, plan)) != links(interfaces(other, plan)):
        return "other stages exchange tensors"
    return None
