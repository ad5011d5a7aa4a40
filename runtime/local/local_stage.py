"""One stage of the model as this rank runs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from pipedream.capture.captured import Captured
from pipedream.capture.loss import Loss
from pipedream.capture.programs.loss_end import Target
from pipedream.graph.command import write_whole
from pipedream.graph.placements.regions import Region
from pipedream.runtime.checkpoint.files import copied, load_model
from pipedream.runtime.checkpoint.saver import CheckpointPart
from pipedream.runtime.local.captures import Captures
from pipedream.runtime.optim.divided import DividedParameters
from pipedream.runtime.optim.muon import check_state
from pipedream.runtime.optim.optimizers import make_optimizer, state_tensors
from pipedream.runtime.optim.rates import LearningRate
from pipedream.runtime.optim.stepping import StageStepping
from pipedream.runtime.run.job import Job
from pipedream.runtime.stages.divide import divide
from pipedream.runtime.stages.partition import StageInterface, holds_first, source_text
from pipedream.runtime.stages.randomness import MinibatchRng
from pipedream.runtime.stages.recordings import Recordings
from pipedream.runtime.stages.selective import refuse_selective
from pipedream.runtime.stages.sharded_stage import ShardedStage
from pipedream.runtime.stages.stage_forms import CapturedStages, StageForms
from pipedream.runtime.stages.stage_module import StageModule
from pipedream.schedule.action import Worker


class LocalStage:
    """One replica of one stage: its modules, parameters and optimizer.

    `stage_modules` compute it, out of `forms` where minibatches vary in shape; `parameters` and
    `buffers` are its part of a checkpoint, of which `sharding` has divided some if the stage has a
    mesh. Its optimizer steps what is `updated`: the parameters, or if replicas have `divided` them,
    this one's parts. Random operators draw from `rng`.
    """

    def __init__(
        self,
        job: Job,
        worker: Worker,
        captures: Captures,
        interface: StageInterface,
        rng: MinibatchRng,
        tied: Mapping[str, Sequence[int]],
        forms: CapturedStages | None = None,
        mesh_device: int = 0,
        loss: Loss | None = None,
    ) -> None:
        """Of the parameters that are `tied` to those of other stages it has copies; they come with
        these stages. `mesh_device`: which device of the stage's mesh this is; then `loss` is for
        the last stage. Raises UserError for placements that cannot be.
        """
        self.job, self.interface, self.rng = job, interface, rng
        self.stage, self.replica = worker
        if self.replica == 0 and mesh_device == 0:
            self._write_source(captures.whole)
        whole = self._stage_module(captures.whole)
        if job.config.records_passes:
            if job.plan.stages[self.stage].by_autograd:
                refuse_selective(self.stage, compiled=False, recorded=True)
            whole.program.recordings = Recordings(job.policy.peak(self.stage).in_flight)
        self.module = whole.piece.module
        ending = loss if self.stage == len(job.plan.stages) - 1 else None
        self.sharding = self._divide(whole, captures, mesh_device, ending)
        others = {n: self._stage_module(smaller) for n, smaller in captures.smaller.items()}
        for other in others.values():
            other.join_mesh(whole)
            other.share(whole, captures.buffers)
        if forms is not None:
            forms.originals[self.stage] = whole
        self.stage_modules = StageForms(whole, others, forms)
        _copy_parameters(self.module, tied)
        self.parameters: dict[str, Parameter] = dict(self.module.named_parameters())
        buffers = self.module.named_buffers()
        self.buffers = {name: buffer for name, buffer in buffers if name in captures.persistent}
        optimizer = captures.optimizer_of(job)
        self.optimizer_of = partial(
            make_optimizer,
            optimizer,
            names=captures.parameters,
            is_divided=self._is_divided,
            fused=not self._has_copies_in_parts(tied),
        )
        self.check_learners = partial(check_state, optimizer, captures.parameters)
        self.divided = self._divided_parameters()
        self.updated = self.parameters if self.divided is None else self.divided.parts
        self.optimizer = self.optimizer_of(self.updated)

    def _divided_parameters(self) -> DividedParameters | None:
        if not self.job.divides_updates(self.stage):
            return None
        replicas = self.job.plan.stages[self.stage].replicas
        return DividedParameters(self.parameters, replicas, self.replica)

    def _stage_module(self, captured: Captured) -> StageModule:
        plan, backend = self.job.plan, self.job.compile_backend
        return StageModule.of(captured, plan, self.stage, self.rng, backend)

    def _divide(
        self, whole: StageModule, captures: Captures, mesh_device: int, loss: Loss | None
    ) -> ShardedStage | None:
        """Leaves this device's parts of parameters and buffers in the module of the stage."""
        if self.job.plan.stages[self.stage].mesh is None:
            return None
        target = None
        if loss is not None:
            whole.end_in(loss)
            target = Target.of(captures.first.target, self.rng.device)
        names = captures.buffers | set(captures.parameters)
        return divide(self.job.plan, captures.whole, whole, mesh_device, names, target)

    def _has_copies_in_parts(self, tied: Mapping[str, Sequence[int]]) -> bool:
        """Returns whether a parameter may be in parts of other shapes in another stage, where each
        element is to remain the same: a fused kernel of the CPU rounds the last elements of a
        tensor in another way than those before them.
        """
        holders = {stage for stages in tied.values() for stage in stages}
        in_parts = any(
            self.job.plan.stages[stage].mesh is not None or self.job.divides_updates(stage)
            for stage in holders
        )
        return in_parts and self.stage in holders and self.rng.device.type == "cpu"

    def _is_divided(self, name: str) -> bool:
        return self.sharding is not None and self.sharding.is_divided(name)

    def _write_source(self, captured: Captured) -> None:
        self.job.run.mkdir(parents=True, exist_ok=True)
        text = source_text(captured, self.job.plan, self.interface, self.interface.build(captured))
        write_whole(self.job.run / f"stage{self.stage}.py", text)

    def make_stepping(
        self, tied: Mapping[str, Sequence[int]], norm_sum: Callable[[torch.Tensor], None]
    ) -> StageStepping:
        """Returns the steps of its optimizer.

        In a norm over all ranks, a parameter counts once: in the first replica, and where several
        stages hold it (`tied`), in the first of them. Of the devices of a mesh each counts its
        part, the first of those that hold the same; and so does each replica that has a part.
        """
        once = self.job.policy.uniform_updates and self.divided is None
        counted = [
            name
            for name in self.parameters
            if holds_first(name, self.stage, tied)
            and (self.sharding is None or self.sharding.counts(name))
        ]
        return StageStepping(
            self.optimizer,
            self.updated,
            self.job.config,
            LearningRate(self.job.config.scheduler, self.optimizer, self.job.directory),
            frozenset(counted) if self.replica == 0 or not once else (),
            norm_sum,
        )

    def step_once(self) -> None:
        """Does a step with copies of the smallest parameters of each type and number of dimensions,
        for what a GPU does when it first comes to one.
        """
        smallest: dict[object, tuple[str, Parameter]] = {}
        for name, parameter in self.parameters.items():
            key = parameter.dtype, parameter.dim()
            if not parameter.requires_grad:
                continue
            if key not in smallest or parameter.numel() < smallest[key][1].numel():
                smallest[key] = name, parameter
        copies = {name: Parameter(each.detach().clone()) for name, each in smallest.values()}
        for copy in copies.values():
            copy.grad = torch.zeros_like(copy)
        self.optimizer_of(copies).step()

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """Its parameters and buffers, by their names in the model."""
        return {**self.parameters, **self.buffers}

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Fills its parameters and buffers with those of a checkpoint. Raises UserError."""
        load_model(path, self.saved, self.region, self.whole_shape)

    def part_of_checkpoint(
        self, replicas: dist.ProcessGroup | None, place: torch.device
    ) -> CheckpointPart | None:
        """Copies of the whole parameters and buffers, and of what the optimizer remembers of them,
        if this rank writes them. Called by all devices of a mesh at the same time, and by all
        `replicas` that have divided the updates, which gather one tensor after the other. `place`:
        where tensors are sent from. Raises PeerLost.
        """
        state = self._state_of_replicas(replicas, place)
        if self.replica != 0:
            return None
        if self.sharding is None:
            return copied(self.saved), copied(state) if self.divided is None else state
        model = {name: self.sharding.gathered(name, each) for name, each in self.saved.items()}
        optimizer = {
            key: self.sharding.gathered(key.rpartition("/")[0], each) for key, each in state.items()
        }
        return None if self.sharding.device else (_present(model), _present(optimizer))

    def _state_of_replicas(
        self, group: dist.ProcessGroup | None, place: torch.device
    ) -> dict[str, torch.Tensor]:
        """Returns, on the first replica, what the optimizer remembers of all parameters: copies if
        it has been divided.
        """
        state = state_tensors(self.optimizer, self.updated)
        if self.divided is None:
            return state
        assert group is not None
        return {
            key: self.divided.gathered(key.rpartition("/")[0], state[key], group, place)
            for key in sorted(state)
        }

    def own_state(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns what this replica keeps of the state of a parameter; None for nothing."""
        return tensor if self.divided is None else self.divided.own_state(name, tensor)

    def region(self, name: str, shape: tuple[int, ...]) -> Region | None:
        """Returns what this rank holds of a tensor of a parameter or a buffer; None for all."""
        return None if self.sharding is None else self.sharding.region(name, shape)

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of all of a parameter or a buffer."""
        if self.sharding is not None and name in self.sharding.shapes:
            return self.sharding.shapes[name]
        return tuple(self.saved[name].shape)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields what it holds between epochs."""
        yield from self.module.parameters()
        yield from self.module.buffers()
        yield from state_tensors(self.optimizer, self.updated).values()


def _present(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _copy_parameters(module: nn.Module, names: Collection[str]) -> None:
    """Replaces these parameters by copies; one that has several names stays one."""
    copies = {
        parameter: Parameter(parameter.detach().clone(), parameter.requires_grad)
        for name, parameter in module.named_parameters()
        if name in names
    }
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in copies:
                setattr(part, name, copies[parameter])
