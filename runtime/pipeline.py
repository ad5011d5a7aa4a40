"""A pipeline that a training loop of the user's own steps: passes and gradients, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipedream.capture.compute_settings import Precision
from pipedream.capture.export import Captured
from pipedream.capture.loss import Loss, checked, load_loss
from pipedream.comm.buckets import StageGroups, make_groups
from pipedream.comm.rank_info import alone, environment
from pipedream.comm.rendezvous import choose_device, connect_store, join
from pipedream.comm.transport import Transport
from pipedream.graph.choices import MICROBATCHES
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan, read_plan, workers_by_rank
from pipedream.runtime.data.order import Sizes
from pipedream.runtime.data.reader import Batch
from pipedream.runtime.engine.action_stream import ActionStream
from pipedream.runtime.engine.engine import Engine
from pipedream.runtime.engine.evaluation import EvaluationExecutor, EvaluationTotals
from pipedream.runtime.engine.executor import Executor
from pipedream.runtime.engine.forward import ForwardExecutor
from pipedream.runtime.engine.randomness import MinibatchRng
from pipedream.runtime.engine.training_segment import TrainingSegment
from pipedream.runtime.engine.weights import Weights
from pipedream.runtime.optim.gradient_sums import GradientSums
from pipedream.runtime.stages.by_kind import ByMinibatch, Call, StageForms, part_of
from pipedream.runtime.stages.partition import holds_first, interfaces, links, tied
from pipedream.runtime.stages.stage_module import StageModule, StageModules
from pipedream.schedule.action import Action
from pipedream.schedule.channel import rank_links
from pipedream.schedule.schedule import Schedule, forwards
from pipedream.schedule.spec import PipelineSpec

Order = Literal["flush", "gpipe"]


class Pipeline:
    """A `model` as the pipeline of a `plan`, under torchrun, mpirun or srun: on each rank its
    stages.

    Every rank makes the same model and the same calls, with the same whole minibatches. Gradients
    of a rank's own stages come to the parameters of `model`; the others keep none, so that an
    optimizer of all parameters steps those of this rank. If torch.distributed is initialized
    already, its ranks are used.
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
    ) -> None:
        """`loss(output, target)` is a mean over the examples; "output" for models that return
        theirs, or the name of a function of torch.nn.functional. `weigh`: where the mean is over
        something else, such as tokens, how many of these each example has, as a tensor [examples];
        it gets what the model gets. `microbatches`: into how many a
        minibatch is cut. `device`: cpu or cuda, by default cuda if there is one. `seed`: of
        dropout. `timeout`: seconds after which a silent rank is taken for lost.

        Raises UserError if the plan is for another number of ranks, has several stages on one, or
        a mesh.
        """
        self.model, self.microbatches, self.schedule = model, microbatches, schedule
        self.plan = plan if isinstance(plan, Plan) else read_plan(Path(plan))
        if any(len(own) > 1 for own in workers_by_rank(self.plan.rank_assignment).values()):
            raise UserError(
                f"the plan has several stages on a rank (order {self.plan.order}), which pd-train "
                "trains; Pipeline runs one on each: make a plan of order 1f1b"
            )
        if any(stage.mesh is not None for stage in self.plan.stages):
            raise UserError(
                "the plan has stages on a mesh of devices, which pd-train trains: make a plan "
                "without --mesh"
            )
        self.loss: Loss = (
            load_loss(loss, Path())
            if isinstance(loss, str)
            else checked(loss, getattr(loss, "__name__", type(loss).__name__))
        )
        self.timeout, self.weigh = timeout, weigh
        self.rank = self._join(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.rng, self.precision = MinibatchRng(seed, self.device), Precision(autocast, self.device)
        self.workers = workers_by_rank(self.plan.rank_assignment)[self.rank]
        self.stages = [stage for stage, _ in self.workers]
        self.trained = self._forms(training=True)
        self.tried = self._forms(training=False)
        self.gradients: dict[int, GradientSums] = {}
        self.checked = 0

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

    def _forms(self, training: bool) -> StageForms:
        return StageForms(self.model, self.plan, self.stages, self.rng, self.precision, training)

    def __call__(
        self, *args: Any, target: Any = None, weights: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Returns the mean loss of a minibatch, the same on all ranks; its `backward` adds the
        gradients, which are computed by then, to those of the parameters.

        `args` and `kwargs` are what the model takes, `target` goes to the loss; their tensors have
        the examples as first dimension. `weights`: the part that each example has in the mean, as a
        tensor [examples]; by default as `weigh` says.

        Raises UserError, and PeerLost if a rank is gone.
        """
        self._check_autocast()
        loss = self._train(args, kwargs, target, weights)
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        computed: Tensor = _Computed.apply(anchor, loss, self._add_gradients)  # type: ignore[no-untyped-call]
        return computed

    def _check_autocast(self) -> None:
        """Raises UserError if autocast of the caller asks for what the pipeline does not do."""
        kind = self.device.type
        lower = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        if torch.is_autocast_enabled(kind) and lower != self.precision.autocast:
            remedy = f'give Pipeline autocast="{lower}"'
            if lower == "float16":
                remedy = "use bfloat16: gradients are there before a scaler scales the loss"
            raise UserError(
                f"the pipeline is called under autocast to {lower}, and it computes in"
                f" {self.precision.autocast or 'the types of the weights'}: {remedy}"
            )

    def _parts(self, args: Any, kwargs: Mapping[str, Any], weights: Tensor | None) -> list[float]:
        """The part of each microbatch in the mean."""
        if weights is None:
            first = Call(args, kwargs).tensors[0]
            counted = self.weigh(*args, **kwargs) if self.weigh else torch.ones(len(first))
            weights = counted.double() / counted.double().sum().clamp(min=1e-300)
        return [
            float(call.tensors[0].sum()) for call in Call((weights,), {}).split(self.microbatches)
        ]

    def _add_gradients(self, factor: float) -> None:
        for stage, executor in self.executors.items():
            self.gradients[stage].add(executor.weights, factor)

    def _train(
        self, args: Any, kwargs: Mapping[str, Any], target: Any, weights: Tensor | None
    ) -> Tensor:
        calls = Call(args, kwargs).split(self.microbatches)
        parts = self._parts(args, kwargs, weights)
        self._check_same(calls)
        forms = [self.trained.of(call) for call in calls]
        losses: list[Tensor] = []
        for stage, executor in self.executors.items():
            executor.stage_modules = ByMinibatch(stage, forms)
            executor.on_loss = lambda _, loss: losses.append(loss.double() / len(calls))
        self.rng.epoch += 1
        self.model.train()
        # The engine makes the mean of the microbatches' gradients.
        data = _Data(calls, _cut(target, calls), [part * len(calls) for part in parts], self.device)
        actions = Schedule(self.spec, len(calls)).actions(*self.workers)
        self._run(self.executors, actions, data)
        return self._sum(losses)

    @torch.no_grad()
    def evaluate(
        self, *args: Any, target: Any = None, weights: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """The mean loss of a minibatch in eval mode, on all ranks. Raises as a call does."""
        self._check_autocast()
        calls = Call(args, kwargs).split(self.microbatches)
        parts = self._parts(args, kwargs, weights)
        sizes = Sizes(sum(map(len, calls)), len(calls[0]))
        factors = [
            part * sizes.examples / len(call) for part, call in zip(parts, calls, strict=True)
        ]
        forms, totals = [self.tried.of(call) for call in calls], EvaluationTotals()
        self._average_buffers()
        executors = {
            stage: EvaluationExecutor(
                ByMinibatch(stage, forms),
                self.transport,
                self.plan.rank_assignment,
                self._loss,
                self._tensors(stage, forms[0][stage]),
                sizes,
                totals,
            )
            for stage in self.stages
        }
        actions = forwards(self.plan.replicas, self.spec.links, len(calls), self.workers)
        data = _Data(calls, _cut(target, calls), factors, self.device)
        self._run(executors, actions, data)
        return self._sum([torch.tensor(totals.loss / sizes.examples, dtype=torch.float64)])

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients down so that the norm of the whole model's is at most this; returns
        what it was, as torch.nn.utils.clip_grad_norm_ does.
        """
        squares = [
            _real(parameter.grad).double().square().sum()
            for stage, replica in self.workers
            for name, parameter in self.executors[stage].weights.parameters.items()
            if parameter.grad is not None and replica == 0 and holds_first(name, stage, self.tied)
        ]
        norm = self._sum(squares).sqrt()
        for executor in self.executors.values():
            for parameter in executor.weights.parameters.values():
                if parameter.grad is not None and norm > max_norm:
                    parameter.grad.mul_(max_norm / (norm + 1e-6))
        return norm

    @torch.no_grad()
    def gather(self) -> nn.Module:
        """Brings the model of every rank up to date, to save or export it; returns it."""
        self._average_buffers()
        own = {
            name: tensor
            for stage in self.stages
            for name, tensor in self._tensors(stage, self._any_form(stage)).items()
        }
        held: list[list[str]] = [[] for _ in range(self.plan.workers)]
        dist.all_gather_object(held, list(own))
        owner = {name: rank for rank in reversed(range(len(held))) for name in held[rank]}
        theirs = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name in sorted(owner.keys() & theirs.keys()):
            value = own.get(name, theirs[name]).detach().to(self.device).contiguous()
            dist.broadcast(value, owner[name])
            if name not in own or own[name] is not theirs[name]:
                theirs[name].data.copy_(value)
        return self.model

    def _run(
        self, executors: Mapping[int, ForwardExecutor], actions: Sequence[Action], data: _Data
    ) -> None:
        stream = ActionStream(TrainingSegment(0, len(data.calls)), actions)
        # Dropout has random numbers of its own; those of the user's code stay alike on all ranks.
        gpus = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(gpus):
            Engine(executors, self.transport).run(stream, data)

    @cached_property
    def captured(self) -> Captured:
        captured = self.trained.first or self.tried.first
        assert captured is not None, "a minibatch is to come first"
        return captured

    @cached_property
    def tied(self) -> Mapping[str, Sequence[int]]:
        return tied(self.captured, interfaces(self.captured, self.plan))

    @cached_property
    def spec(self) -> PipelineSpec:
        bounds = self.plan.max_in_flight if self.plan.schedule == self.schedule else None
        return PipelineSpec(
            self.schedule,
            self.plan.replicas,
            links(interfaces(self.captured, self.plan)),
            self.microbatches,
            max_in_flight=bounds,
            tied=tuple(sorted({stage for stages in self.tied.values() for stage in stages})),
        )

    @cached_property
    def transport(self) -> Transport:
        ways = rank_links(self.plan.rank_assignment, self.spec.links)
        return Transport(self.device, self.backend, ways)

    @cached_property
    def groups(self) -> Sequence[StageGroups]:
        return make_groups(self.plan.rank_assignment, self.tied)

    @cached_property
    def executors(self) -> dict[int, Executor]:
        """The training of this rank's stages; their modules change with the minibatches."""
        return {stage: self._executor(stage, self._any_form(stage)) for stage in self.stages}

    def _executor(self, stage: int, form: StageModule) -> Executor:
        groups = self.groups[stage]
        self.gradients[stage] = GradientSums(shared=groups.replicas is not None)
        return Executor(
            stage_modules=StageModules(form),
            transport=self.transport,
            assignment=self.plan.rank_assignment,
            loss=self._loss,
            weights=Weights(dict(form.piece.module.named_parameters())),
            stepping=self.gradients[stage],
            groups=groups,
            on_loss=lambda _minibatch, _loss: None,
            rng=self.rng,
            recompute=self.plan.stages[stage].recompute,
        )

    def _any_form(self, stage: int) -> StageModule:
        first, *_ = (self.trained.forms or self.tried.forms).values()
        return first[stage]

    def _tensors(self, stage: int, form: StageModule) -> dict[str, Tensor]:
        """Parameters and buffers of a stage as they are now; `form` names those that it needs."""
        now = self._any_form(stage).piece.module
        known = dict(form.piece.module.named_buffers()) | dict(form.piece.module.named_parameters())
        current = dict(now.named_buffers()) | dict(now.named_parameters())
        return {name: current.get(name, tensor) for name, tensor in known.items()}

    def _average_buffers(self) -> None:
        """Makes the statistics of batch norm and the like their mean over the replicas."""
        for stage in self.stages:
            names = {name for name, _ in self.model.named_buffers()}
            held = self._any_form(stage).piece.module.named_buffers()
            buffers = [buffer for name, buffer in held if name in names]
            self.transport.average(buffers, self.groups[stage].replicas)

    def _loss(self, output: Any, target: tuple[Any, float]) -> Tensor:
        target, factor = target
        with self.precision.computing():
            return self.loss(output, target) * factor

    def _sum(self, values: Sequence[Tensor]) -> Tensor:
        """Of all ranks, as a float64 scalar."""
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for value in values:
            total += value.detach().to(self.device)
        self.transport.begin_sum(total, None).wait()
        return total[0]

    def _check_same(self, calls: Sequence[Call]) -> None:
        """Raises UserError if ranks have begun with other weights, or have other minibatches."""
        self.checked += 1
        if self.checked > _CHECKED and self.checked % _CHECKED_AGAIN:
            return
        if self.checked == 1:
            remedy = "call torch.manual_seed before you make it"
            self._compare("models", self.model.parameters(), remedy)
        remedy = "no sampler may divide the data among the ranks"
        self._compare("minibatches", calls[0].tensors, remedy)

    def _compare(self, what: str, tensors: Iterable[Tensor], remedy: str) -> None:
        """Raises UserError on all ranks unless each has tensors of the same sums."""
        sums = torch.tensor([float(_real(tensor.detach()).double().sum()) for tensor in tensors])
        own = torch.cat([sums, -sums]).to(self.device)
        largest = own.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if not torch.equal(largest, own):
            raise UserError(f"the ranks have different {what}: {remedy}")


def _real(tensor: Tensor) -> Tensor:
    """The parts of complex numbers are numbers of their own."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class _Computed(torch.autograd.Function):
    """A loss whose gradients are known: `add(factor)` adds them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, add: Callable[[float], None]) -> Tensor:
        ctx.add = add
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[None, None, None]:
        ctx.add(float(factors[0]))
        return None, None, None


_CHECKED = 3
"""The first minibatches, which are compared between the ranks."""

_CHECKED_AGAIN = 100
"""Of those that follow, one in so many is compared, too."""


@dataclass(frozen=True)
class _Data:
    """The microbatches of a minibatch; the loss of each counts `factors` times."""

    calls: Sequence[Call]
    targets: Sequence[Any]
    factors: Sequence[float]
    device: torch.device

    def inputs(self, minibatch: int, which: Iterable[int]) -> list[Tensor]:
        tensors = self.calls[minibatch].tensors
        return [tensors[position].to(self.device) for position in which]

    def peek(self, minibatch: int) -> Batch:
        return Batch(tuple(self.calls[minibatch].tensors), self.targets[minibatch])

    def target(self, minibatch: int) -> tuple[Any, float]:
        target = pytree.tree_map_only(Tensor, lambda x: x.to(self.device), self.targets[minibatch])
        return target, self.factors[minibatch]


def _cut(target: Any, calls: Sequence[Call]) -> list[Any]:
    """The part of `target` for each call."""
    ends = list(accumulate(len(call) for call in calls))
    return [
        part_of(target, slice(end - len(call), end)) for call, end in zip(calls, ends, strict=True)
    ]
