"""The loss and the outputs of a minibatch of a loop of the user's own, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipedream.graph.errors import UserError
from pipedream.runtime.engine.evaluation import Evaluation, EvaluationExecutor, Evaluator
from pipedream.runtime.engine.forward import Tensors
from pipedream.runtime.engine.minibatch_state import MinibatchState
from pipedream.runtime.engine.wiring import Wiring
from pipedream.runtime.loop.gathering import of_all_ranks
from pipedream.runtime.loop.split_minibatch import SplitMinibatch, WeightedLoss
from pipedream.runtime.loop.staged_model import StagedModel
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.schedule.action import Action, Worker
from pipedream.schedule.schedule import forwards


@dataclass
class _OutputExecutor(EvaluationExecutor):
    """Evaluates a stage, and keeps what the last one returns for each microbatch; with the loss
    only if it is `losing`.
    """

    losing: bool = True
    returned: dict[int, Any] = field(default_factory=dict)

    def _take_outputs(
        self, action: Action, state: MinibatchState, stage_module: StageModule, known: Tensors
    ) -> None:
        output = stage_module.output(known)
        self.returned[action.minibatch] = pytree.tree_map_only(Tensor, lambda x: x.cpu(), output)
        if self.losing:
            super()._take_outputs(action, state, stage_module, known)


@dataclass(frozen=True)
class MinibatchEvaluation:
    """The passes of one minibatch through the model as it is, on all ranks alike."""

    staged: StagedModel
    wiring: Wiring
    workers: Sequence[Worker]
    minibatch: SplitMinibatch
    loss_function: WeightedLoss

    def loss(self) -> Tensor:
        """Returns the mean loss, on all ranks."""
        return self._run(EvaluationExecutor)[0]

    def outputs(self, with_loss: bool) -> tuple[Tensor | None, Any]:
        """Returns the mean loss, unless there is none; what the model returns, on the CPU of all
        ranks.

        Raises UserError if a tensor does not have the examples as its first dimension.
        """
        loss, executors = self._run(partial(_OutputExecutor, losing=with_loss))
        returned = {number: each for one in executors for number, each in one.returned.items()}
        return loss if with_loss else None, self._joined(returned)

    def _run(self, kind: Callable[..., Evaluator]) -> tuple[Tensor, list[Evaluator]]:
        staged, plan, minibatch = self.staged, self.wiring.plan, self.minibatch
        calls, sizes = minibatch.calls, minibatch.sizes
        forms = {stage: staged.forms_of(stage, calls) for stage, _ in self.workers}
        actions = forwards(plan.replicas, staged.spec.links, len(calls), self.workers)
        # The executors make a mean over the examples.
        means = minibatch.times([sizes.examples / len(call) for call in calls])
        tensors = {stage: staged.taken_tensors(stage) for stage in forms}
        evaluation = Evaluation(forms, sizes, actions, plan.rank_assignment)
        with self.wiring.rng.apart():
            totals, executors = evaluation.run(
                means, tensors, self.wiring.transport, self.loss_function, kind
            )
        staged.bring_back()
        loss = torch.tensor(totals.loss / sizes.examples, dtype=torch.float64)
        return self.wiring.total([loss] * staged.counts), executors

    def _joined(self, returned: Mapping[int, Any]) -> Any:
        """Returns the output of the minibatch, from what this rank has of its microbatches."""
        every = of_all_ranks(dict(returned))
        of_number = {number: each for there in every for number, each in there.items()}
        sizes, parts = list(map(len, self.minibatch.calls)), self.minibatch.factors
        flat = [pytree.tree_flatten(of_number[number]) for number in range(len(sizes))]
        leaves = zip(*(leaves for leaves, _ in flat), strict=True)
        return pytree.tree_unflatten([_joined(each, sizes, parts) for each in leaves], flat[0][1])


def _joined(leaves: Sequence[Any], sizes: Sequence[int], parts: Sequence[float]) -> Any:
    """Returns the leaf of the whole. `parts`: how much each microbatch counts in a scalar."""
    if not isinstance(leaves[0], Tensor):
        return leaves[0]
    if all(leaf.dim() == 0 for leaf in leaves):
        pairs = zip(leaves, parts, strict=True)
        return torch.stack([leaf * part for leaf, part in pairs if part]).sum()
    if any(not leaf.dim() or len(leaf) != n for leaf, n in zip(leaves, sizes, strict=True)):
        shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
        raise UserError(
            f"the model returns tensors {shapes} for microbatches of {', '.join(map(str, sizes))}"
            " examples: what it returns is to have the examples as its first dimension, or give"
            " microbatches=1"
        )
    return torch.cat(list(leaves))
