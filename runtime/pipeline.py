"""A pipeline that a training loop of the user's own steps: passes and gradients, nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from pipedream.capture.compute_settings import Precision, eval_mode
from pipedream.capture.loss import Loss, load_loss
from pipedream.capture.loss import checked as checked_loss
from pipedream.comm.rank_info import alone, environment
from pipedream.comm.rendezvous import choose_device, connect_store, join
from pipedream.graph.choices import MICROBATCHES
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan, read_plan, workers_by_rank
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.engine.executor import Executor
from pipedream.runtime.engine.first_passes import MadeUpMessages, do_once, unchanged_buffers
from pipedream.runtime.engine.forward import Minibatches
from pipedream.runtime.engine.wiring import Wiring
from pipedream.runtime.loop.agreement import Agreement, check_precision
from pipedream.runtime.loop.evaluation import MinibatchEvaluation
from pipedream.runtime.loop.gathering import gather_tensors, whole_state
from pipedream.runtime.loop.model_state import ModelState
from pipedream.runtime.loop.split_minibatch import SplitMinibatch, WeightedLoss
from pipedream.runtime.loop.staged_model import StagedModel
from pipedream.runtime.optim.gradient_sums import GradientSums, with_gradients
from pipedream.runtime.optim.weights import Weights
from pipedream.runtime.run.action_stream import ActionStream
from pipedream.runtime.run.training_segment import TrainingSegment
from pipedream.runtime.selfcheck.first_call import compare, expect
from pipedream.runtime.stages.randomness import MinibatchRng
from pipedream.runtime.stages.stage_forms import Call, CapturedStages
from pipedream.schedule.action import Action
from pipedream.schedule.schedule import Schedule

Order = Literal["flush", "gpipe"]

_STATES = 8
"""So many states of the model are kept as captured: a loop may freeze and thaw in turn."""

_OFTEN = 20
"""A model that was captured anew so many times is one that changes all the time."""


class Pipeline:
    """A `model` as the pipeline of a `plan`, under torchrun, mpirun or srun: on each rank its
    stages.

    Every rank makes the same model and the same calls, with the same whole minibatches. Gradients
    of a rank's own stages come to the parameters of `model`; the others keep none, so that an
    optimizer of all parameters steps those of this rank. All devices of a mesh step all parameters
    of their stage, which they divide for the passes alone. The model may change between calls, on
    all ranks alike. If torch.distributed is initialized already, its ranks are used.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | str | Path,
        loss: Callable[[Any, Any], Tensor] | str = "output",
        *,
        weigh: Callable[..., Tensor] | None = None,
        microbatches: int = MICROBATCHES,
        schedule: Order = "flush",
        device: str | None = None,
        autocast: Literal["bfloat16"] | None = None,
        seed: int = 0,
        timeout: float = 300.0,
        checked: bool = True,
    ) -> None:
        """`loss(output, target)` is a mean over the examples; "output" for models that return
        theirs, or the name of a function of torch.nn.functional. `weigh`: where the mean is over
        something else, such as tokens, how many of these each example has, as a tensor [examples];
        it gets what the model gets. `microbatches`: into how many a
        minibatch is cut. `device`: cpu or cuda, by default cuda if there is one. `seed`: of
        dropout. `timeout`: seconds after which a silent rank is taken for lost. `checked`: whether
        what is captured, and the first minibatch, are compared with the model itself.

        Raises UserError if the plan is for another number of ranks, has several stages on one, or
        divides the optimizer's state (zero), or for another `autocast`.
        """
        if autocast not in (None, "bfloat16"):
            raise UserError(
                f"autocast={autocast!r}: Pipeline takes 'bfloat16' alone, since gradients are there"
                " before a scaler scales the loss"
            )
        self.model, self.microbatches, self.schedule = model, microbatches, schedule
        self.plan = plan if isinstance(plan, Plan) else read_plan(Path(plan))
        if any(len(own) > 1 for own in workers_by_rank(self.plan.rank_assignment).values()):
            raise UserError(
                f"the plan has several stages on a rank (order {self.plan.order}), which pd-train "
                "trains; Pipeline runs one on each: make a plan of order 1f1b"
            )
        divided = next((str(stage.stage) for stage in self.plan.stages if stage.zero), None)
        if divided is not None:
            raise UserError(
                f"stage {divided} of the plan has zero: its replicas divide the optimizer's state,"
                " which pd-train does; with Pipeline the optimizer is yours: make a plan with"
                " pd-optimize --zero never"
            )
        self.loss: Loss = (
            load_loss(loss, Path())
            if isinstance(loss, str)
            else checked_loss(loss, getattr(loss, "__name__", type(loss).__name__))
        )
        self.timeout, self.weigh, self.checked = timeout, weigh, checked
        self.rank = self._join(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.rng, self.precision = MinibatchRng(seed, self.device), Precision(autocast, self.device)
        self.weighted_loss = WeightedLoss(self.loss, self.precision)
        self.workers = workers_by_rank(self.plan.rank_assignment)[self.rank]
        self.stages = [stage for stage, _ in self.workers]
        self.agreement = Agreement(model, self.device)
        self.staged = lru_cache(_STATES)(self._stage)
        self.wired: dict[Hashable, Wiring] = {}
        self.now: StagedModel | None = None

    def _join(self, wanted: str) -> int:
        """Meets the other ranks; returns the rank. Raises UserError."""
        workers, info = self.plan.workers, environment() or alone()
        if dist.is_initialized():
            rank, started = dist.get_rank(), dist.get_world_size()
            info = replace(info, rank=rank, world_size=started)
        if info.world_size != workers:
            raise UserError(
                f"the plan is for {workers} workers and {info.world_size} were started: start "
                f"{workers}, by torchrun --nproc-per-node {workers}, or make another plan"
            )
        self.device, backend = choose_device(wanted, info)
        if not dist.is_initialized():
            join(info, connect_store(info, self.timeout), backend, self.device, self.timeout)
        self.backend = backend if backend in dist.get_backend() else "gloo"
        return info.rank

    def _stage(self, _: ModelState) -> StagedModel:
        """Returns the model, which is in this state now."""
        given = self.model, self.plan, self.stages, self.rng, self.precision
        forms = CapturedStages(*given, backend=self.plan.compile)  # as it was measured
        forms.checked = self.checked and self.rank == 0
        (team,) = (self.plan.rank_assignment[stage][replica] for stage, replica in self.workers)
        forms.mesh_device = team.ranks.index(self.rank)
        if self.staged.cache_info().misses == _OFTEN:
            warnings.warn(
                "the model changes from call to call and is captured each time, which takes long:"
                " keep what changes, such as a count of steps, outside of it",
                stacklevel=2,
            )
        return StagedModel(forms, self.schedule, self.microbatches)

    def _wiring(self, staged: StagedModel) -> Wiring:
        """Made once for all states of the model whose stages exchange and hold the same."""
        links, tied = staged.spec.links, staged.tied
        key = links, tuple(tied.items()), tuple(staged.partial.items())
        if key not in self.wired:
            own = {stage: staged.partial[stage] for stage in self.stages if stage in staged.partial}
            self.wired[key] = Wiring.of(
                self.plan, links, tied, self.rng, self.backend, self.timeout, own
            )
        for stage in self.stages:
            if (sharding := staged.sharding(stage)) is not None:
                sharding.groups = self.wired[key].groups[stage].team
        return self.wired[key]

    def __call__(
        self, *args: Any, target: Any = None, weights: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Returns the mean loss of a minibatch, the same on all ranks; its `backward` adds the
        gradients, which are computed by then, to those of the parameters.

        `args` and `kwargs` are what the model takes, `target` goes to the loss; their tensors have
        the examples as first dimension. `weights`: the part that each example has in the mean, as a
        tensor [examples]; by default as `weigh` says. The model runs as it is at this moment: each
        module in its mode, with the parameters that learn. Under torch.no_grad there is a loss
        alone.

        Raises UserError, and PeerLost if a rank is gone.
        """
        minibatch = self._minibatch(args, kwargs, target, weights)
        self.rng.epoch += 1
        learns = any(parameter.requires_grad for parameter in self.model.parameters())
        if not (learns and torch.is_grad_enabled()):
            return self._evaluation(minibatch).loss()
        return with_gradients(*self._train(minibatch))

    @torch.no_grad()
    def evaluate(
        self, *args: Any, target: Any = None, weights: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Returns the mean loss of a minibatch in eval mode, on all ranks; afterwards each module
        is in its own mode again. Raises as a call does.
        """
        with eval_mode(self.model):
            return self._evaluation(self._minibatch(args, kwargs, target, weights)).loss()

    @torch.no_grad()
    def predict(
        self,
        *args: Any,
        target: Any = None,
        weights: Tensor | None = None,
        with_loss: bool = True,
        **kwargs: Any,
    ) -> tuple[Tensor | None, Any]:
        """As `evaluate`; and what the model returns for the minibatch, on the CPU of all ranks. The
        loss is None unless `with_loss`, for inputs without a target.
        """
        with eval_mode(self.model):
            minibatch = self._minibatch(args, kwargs, target, weights)
            return self._evaluation(minibatch).outputs(with_loss)

    def _minibatch(
        self, args: Any, kwargs: Mapping[str, Any], target: Any, weights: Tensor | None
    ) -> SplitMinibatch:
        check_precision(self.precision)
        # A loop for evaluation may be in inference mode, in which nothing can be captured.
        with torch.inference_mode(False):
            args, kwargs, target = pytree.tree_map_only(
                Tensor, lambda x: x.clone() if x.is_inference() else x, (args, kwargs, target)
            )
            calls = Call(args, kwargs).split(self.microbatches)
            if weights is None:
                weights = torch.ones(sum(map(len, calls)))
                weights = (self.weigh(*args, **kwargs) if self.weigh else weights).double()
                weights = weights / weights.sum()
            return SplitMinibatch.of(calls, target, weights, self.microbatches, self.device)

    def _staged_for(self, minibatch: SplitMinibatch, what: str) -> StagedModel:
        """Returns the model as it is now. Raises UserError unless all ranks have the same."""
        with torch.inference_mode(False), torch.enable_grad():
            staged = self.now = self.staged(ModelState.of(self.model))
            for call in minibatch.calls:
                staged.forms.of(call)
        texts = [staged.forms.texts[call.kind] for call in minibatch.calls]
        own = [each for stage in self.stages for each in staged.parameters(stage).values()]
        self.agreement.check(what, texts, minibatch.calls[0].tensors, own)
        if what == "training":
            self.agreement.note_trained(own)
        return staged

    def _train(self, minibatch: SplitMinibatch) -> tuple[Tensor, list[tuple[Parameter, Tensor]]]:
        """Returns the loss, and the gradients of the parameters of this rank that learn."""
        first = self.now is None  # all ranks have the whole model, as it is
        staged, count = self._staged_for(minibatch, "training"), len(minibatch.calls)
        wiring = self._wiring(staged)
        # The engine makes the mean of the microbatches' gradients.
        data = minibatch.times([count] * count)
        expected = expect(staged, data, self.weighted_loss) if self.checked and first else None
        sums = {stage: GradientSums() for stage in self.stages}
        losses: dict[int, Tensor] = {}
        executors = self._executors(staged, minibatch, wiring, sums, losses)
        actions = Schedule(staged.spec, count).actions(*self.workers)
        with self.rng.apart():
            if self.backend == "nccl":
                self._pass_first(staged, minibatch, actions, data)
            stream = ActionStream(TrainingSegment(0, count), actions)
            Engine(executors, wiring.transport, seen=staged.seen).run(stream, data)
        staged.bring_back()
        gradients = {s: staged.whole_gradients(s, own.gradients) for s, own in sums.items()}
        if expected is not None:
            compare(expected, staged, self.workers, losses, gradients.values())
        loss = wiring.total(each.double() / count for each in losses.values())
        parameters = {stage: staged.parameters(stage) for stage in self.stages}
        return loss, [
            (parameters[stage][name], gradient)
            for stage in self.stages
            for name, gradient in gradients[stage].items()
        ]

    def _executors(
        self,
        staged: StagedModel,
        minibatch: SplitMinibatch,
        wiring: Wiring,
        sums: Mapping[int, GradientSums],
        losses: dict[int, Tensor],
    ) -> dict[int, Executor]:
        return {
            stage: wiring.executor(
                stage,
                staged.forms_of(stage, minibatch.calls),
                self.weighted_loss,
                Weights(staged.taken_parameters(stage)),
                sums[stage],
                losses.__setitem__,
                sharding=staged.sharding(stage),
            )
            for stage in self.stages
        }

    def _pass_first(
        self,
        staged: StagedModel,
        minibatch: SplitMinibatch,
        actions: Sequence[Action],
        data: Minibatches,
    ) -> None:
        """Does the passes of microbatches of new kinds once before they exchange messages."""
        new = {
            call.kind: number
            for number, call in enumerate(minibatch.calls)
            if call.kind not in staged.passed
        }
        apart = replace(self._wiring(staged), transport=MadeUpMessages(self.device))
        sums = {stage: GradientSums() for stage in self.stages}
        executors = self._executors(staged, minibatch, apart, sums, {})
        with ExitStack() as unchanged:
            for stage in self.stages:
                unchanged.enter_context(
                    unchanged_buffers(staged.forms.originals[stage].piece.module)
                )
            do_once(executors, actions, new.values(), data)
        staged.passed.update(new)

    @torch.no_grad()
    def _evaluation(self, minibatch: SplitMinibatch) -> MinibatchEvaluation:
        staged = self._staged_for(minibatch, "evaluation")
        if not self.model.training:
            self._average_buffers(staged)
        wiring, loss = self._wiring(staged), self.weighted_loss
        return MinibatchEvaluation(staged, wiring, self.workers, minibatch, loss)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients down so that the norm of the whole model's is at most this; returns
        what it was, as torch.nn.utils.clip_grad_norm_ does.
        """
        staged = self.now
        if staged is None:
            raise UserError("clip_grad_norm_: there are no gradients yet: call the pipeline first")
        return staged.clip_gradients(self.workers, max_norm, self._wiring(staged).total)

    @torch.no_grad()
    def gather(self) -> nn.Module:
        """Brings the model of every rank up to date, to save or export it; returns it."""
        if self.now is not None:
            self._average_buffers(self.now)
            own = {n: t for stage in self.stages for n, t in self.now.tensors(stage).items()}
            gather_tensors(self.model, own, self.device)
            self.agreement.note_gathered()
        return self.model

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """`optimizer.state_dict()` of an optimizer of the whole model, with what each rank knows of
        its own parameters, on all ranks; all call it. Each of them can load it again, and so can
        one process, or another plan.
        """
        trained = self.agreement.trained
        return whole_state(optimizer, None if trained is None else trained.values())

    def _average_buffers(self, staged: StagedModel) -> None:
        for stage in self.stages:
            self._wiring(staged).average_buffers(stage, staged.buffers(stage))
