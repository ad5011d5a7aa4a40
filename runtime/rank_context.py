"""A rank among the others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from pipedream.capture.compute_settings import Precision
from pipedream.comm.rendezvous import connect_store, join, keep_torch_from_aborting
from pipedream.comm.store_messages import broadcast
from pipedream.graph.run_config import AsynchronousConfig
from pipedream.runtime.checkpoint.saver import CheckpointPart, Saver
from pipedream.runtime.engine.executor import Executor, Updates
from pipedream.runtime.engine.first_passes import MadeUpMessages
from pipedream.runtime.engine.wiring import Wiring
from pipedream.runtime.local.local_model import LocalModel
from pipedream.runtime.local.local_stage import LocalStage
from pipedream.runtime.local.resume import begin, resume
from pipedream.runtime.optim.error_feedback import ErrorFeedback
from pipedream.runtime.optim.late_gradients import rate_factor, scale_rate, turns_every
from pipedream.runtime.optim.prediction import Prediction
from pipedream.runtime.optim.rates import LossSum
from pipedream.runtime.optim.stepping import Stepping
from pipedream.runtime.optim.weights import Weights
from pipedream.runtime.report.clock import Clock
from pipedream.runtime.report.live_table import Display
from pipedream.runtime.report.metrics.writers import Writers
from pipedream.runtime.report.peak_memory import PeakMemory
from pipedream.runtime.report.recording import Recorder
from pipedream.runtime.run.alike import check_alike
from pipedream.runtime.run.training_segment import Position, whole_updates
from pipedream.runtime.selfcheck.rehearsal import first_passes, rehearse
from pipedream.runtime.supervise.device_progress import DeviceProgress
from pipedream.runtime.supervise.graceful_stop import GracefulStop
from pipedream.runtime.supervise.heartbeat import Heartbeats
from pipedream.runtime.supervise.retune import Retuner
from pipedream.runtime.supervise.watchdog import Watchdog


class RankContext:
    """What a rank shares with the others, and what it has while it trains.

    Made by all ranks at the same time; then each is at `first`, where the run begins. `weights`
    and `peak_in_flight`, the most minibatches between forward and backward, are by stage.
    `heartbeats` is there if pd-train's own launcher started the ranks, else `watchdog` if there are
    other ranks; `progress` on a GPU; `display` on rank 0 alone. `metrics` are those of the held-out
    data, on rank 0, where `retuner` is while the run may change its plan; `changes_plan`: it does
    so at the checkpoint where all ranks are.
    """

    def __init__(
        self, local: LocalModel, heartbeats: Heartbeats | None, store: Store | None = None
    ) -> None:
        """`store` is there if the ranks have met before, to plan again."""
        job, rank_info = local.job, local.rank_info
        self.local, self.heartbeats = local, heartbeats
        self.writers = self._writers()  # before the others are met: a writer may refuse
        connected = store or connect_store(rank_info, job.timeout)
        if local.backend == "nccl":
            keep_torch_from_aborting()
        self.store = join(rank_info, connected, local.backend, local.device, job.timeout)
        check_alike(job, bool(local.tied), self.store, rank_info, local.device)
        self.watchdog = (
            Watchdog.of(self.store, rank_info, job.timeout) if heartbeats is None else None
        )
        self.progress = self._watched_progress()
        self.clock = Clock(self.store, rank_info.rank, rank_info.world_size)
        self.clock.read()
        self.recorder = Recorder(self.clock, job.trace, whole_updates(1, job.policy))
        self.wiring = Wiring.of(
            job.plan,
            local.spec.links,
            local.tied,
            local.rng,
            local.backend,
            job.timeout,
            {
                stage.stage: set(stage.sharding.partial.values())
                for stage in local.stages
                if stage.sharding is not None
            },
        )
        self.transport = self.wiring.transport
        for stage in local.stages:  # devices of a mesh may exchange tensors from now on
            if stage.sharding is not None:
                stage.sharding.groups = self.wiring.groups[stage.stage].team
        self.stepping = self._stepping()
        if local.backend == "nccl":  # where a pass that is done first would wait for messages
            self.say("at the first passes")
            apart = replace(self.wiring, transport=MadeUpMessages(local.device))
            first_passes(local, partial(self.executor, wiring=apart))
        if not (job.unchecked or job.restarted):
            self.say("at the self-check")
            rehearse(local, self.store, self.transport, self.executor, self.progress)
        self.first = self._begin()
        self.saver = self._saver()
        self.weights = {stage.stage: self._weights(stage) for stage in local.stages}
        self.graceful_stop = GracefulStop(self.store, rank_info, job.policy, self._launcher_asks)
        tensors = (tensor for stage in local.stages for tensor in stage.tensors())
        self.memory = PeakMemory(local.device, tensors)
        self.display = self._display() if rank_info.rank == 0 else None
        self.peak_in_flight = {stage.stage: 0 for stage in local.stages}
        self.metrics: dict[str, float] = {}
        self.retuner: Retuner | None = None
        self.changes_plan = False

    def executor(
        self,
        stage: LocalStage,
        weights: Weights,
        stepping: Updates,
        on_loss: Callable[[int, torch.Tensor], None],
        wiring: Wiring | None = None,
    ) -> Executor:
        """Returns what trains a stage of this rank."""
        policy, config = self.local.job.policy, self.local.job.config
        return (wiring or self.wiring).executor(
            stage.stage,
            stage.stage_modules,
            self._loss,
            weights,
            stepping,
            on_loss,
            per_update=config.microbatches if policy.uniform_updates else config.accumulate,
            sharding=stage.sharding,
        )

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        with Precision(self.local.job.config.autocast, self.local.device).computing():
            return self.local.loss(output, target)

    def say(self, words: str) -> None:
        """Tells those who watch this rank what it does from now on."""
        if self.heartbeats is not None:
            self.heartbeats.report(self.local.rank_info.rank, words)
        if self.watchdog is not None:
            self.watchdog.say(words)
        if self.progress is not None:
            self.progress.words = words

    def save(self, position: Position) -> None:
        """Begins to save this rank's part, and waits until rank 0 is here, which says whether the
        run changes its plan.

        In the next segment others would wait for its last save no longer than the timeout.
        """
        for stage in self.local.stages:
            self.wiring.average_buffers(stage.stage, stage.buffers)
        self.saver.end()  # else there would be copies for two saves at a time
        parts = {
            stage.stage: part
            for stage in self.local.stages
            if (part := self._part_of_checkpoint(stage)) is not None
        }
        self.saver.begin(position, parts, self.stepping.state())
        goes_on = position < Position(self.local.job.epochs)
        changes = self.retuner is not None and goes_on and self.retuner.adopt()
        rank_info = self.local.rank_info
        self.changes_plan = broadcast(self.store, rank_info, f"at/{position}", changes)

    def _part_of_checkpoint(self, stage: LocalStage) -> CheckpointPart | None:
        replicas = self.wiring.groups[stage.stage].replicas
        return stage.part_of_checkpoint(replicas, self.transport.staged)

    def _begin(self) -> Position:
        """Gives the stages what they begin with; the position where they are then."""
        local, job = self.local, self.local.job
        if job.goes_on:
            return resume(local, self.stepping)
        if job.init is not None:
            loaded = begin(job.init, local.stages, job.init_optimizer)
            if local.rank_info.rank == 0:
                print(f"training: begins with {loaded}", file=sys.stderr, flush=True)
        return Position(0)

    def _watched_progress(self) -> DeviceProgress | None:
        """Returns that of this rank's GPU, at which those who tell others of this rank look."""
        progress = DeviceProgress.of(self.local.device, self.local.job.timeout)
        watching = self.watchdog if self.heartbeats is None else self.heartbeats
        if progress is not None and watching is not None:
            watching.look = progress.look
        return progress

    def _saver(self) -> Saver:
        local = self.local
        return Saver(
            folder=local.job.checkpoints,
            stages=len(local.interfaces),
            store=self.store,
            publishes=local.rank_info.rank == 0,
            timeout=local.job.timeout,
            keep=local.job.keep,
            device=local.device,
            recorded=lambda at: self.display is None or self.display.has_recorded(at),
            details={
                "optimizer": local.job.optimizer_names,
                "batch_size": local.job.config.batch_size,
            },
        )

    @property
    def _launcher_asks(self) -> Callable[[], bool] | None:
        """Whether pd-train's launcher asks the run to stop; None if it did not start this rank."""
        heartbeats = self.heartbeats
        return None if heartbeats is None else lambda: heartbeats.stop_requested

    def _stepping(self) -> Stepping:
        local, job = self.local, self.local.job
        return Stepping(
            {
                stage.stage: stage.make_stepping(local.tied, self._norm_sum(stage))
                for stage in local.stages
            },
            job.config,
            LossSum(self.wiring.add_up, local.device),
            self.wiring.add_up,
        )

    def _norm_sum(self, stage: LocalStage) -> Callable[[torch.Tensor], None]:
        """Adds a tensor up, in place, over those that have parts of the stage's gradients."""
        groups = self.wiring.groups[stage.stage]
        team = None if groups.team is None else groups.team.whole
        over = [] if team is None else [team.group]
        if stage.divided is not None and groups.replicas is not None:
            over.append(groups.replicas)

        def add_up(tensor: torch.Tensor) -> None:
            for group in over:
                self.transport.begin_sum(tensor, group).wait()

        return add_up

    def _weights(self, stage: LocalStage) -> Weights:
        """Returns the weights at `first`, with what the config asks for against stale gradients.

        The delays come from the schedule: the last stage has none, and nothing to correct.
        """
        local, config = self.local, self.local.job.config
        epoch = local.schedule(local.examples.minibatches)
        begun = self.first.minibatch // epoch.policy.round_size(stage.stage)
        updates = self.first.epoch * epoch.rounds(stage.stage) + begun
        if config.asynchronous == AsynchronousConfig():
            return Weights(stage.parameters, updates, divided=stage.divided)
        wanted, optimizer = config.asynchronous, stage.optimizer
        segment = local.schedule(local.segment_minibatches)
        delay = max(segment.delays(stage.stage).values())
        predicting = wanted.weight_prediction and delay > 0
        prediction = Prediction(optimizer, stage.parameters) if predicting else None
        weights = Weights(stage.parameters, updates, prediction, stage.divided)
        scale_rate(optimizer, lambda: rate_factor(config, delay, weights.current.number))
        if wanted.basis_rotation is not None:
            stages = range(len(local.spec.replicas))
            greatest = max(max(segment.delays(each).values()) for each in stages)
            for group in optimizer.param_groups:
                group["every"] = turns_every(wanted.basis_rotation.every, delay, greatest)
        if wanted.error_feedback and delay > 0:
            weights.feedback = ErrorFeedback(optimizer, float(wanted.error_feedback))
        return weights

    def _display(self) -> Display:
        job, first = self.local.job, self.first
        return Display(
            job.run / "metrics.jsonl",
            self.local.examples.sizes,
            self.local.examples.minibatches * (job.epochs - first.epoch) - first.minibatch,
            job.plan.rank_assignment,
            self.writers,
            first,
            self._learning_rates,
            self._launcher_asks or (lambda: False),
        )

    def _writers(self) -> Writers:
        """Begins those of metrics, on rank 0. Raises UserError if one does not begin."""
        job = self.local.job
        first = (job.saved if job.goes_on else None) or Position(0)
        if self.local.rank_info.rank or (job.has_summary and first >= Position(job.epochs)):
            return Writers({})
        writers = Writers.of(job)
        writers.begin(job, first.epoch * self.local.examples.minibatches + first.minibatch)
        return writers

    def _learning_rates(self) -> list[float]:
        """Returns that of each group of parameters, alike in all stages but for corrections."""
        first, *_ = self.local.stages
        return [float(group["lr"]) for group in first.optimizer.param_groups]
