"""A rank among the others: what it shares with them, and what it has while it trains."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import Store

from pipedream.comm.process_groups import make_groups
from pipedream.comm.rendezvous import join, meet
from pipedream.comm.transport import Transport
from pipedream.graph.run_config import AsynchronousConfig
from pipedream.runtime.checkpoint.resume import resume
from pipedream.runtime.checkpoint.saver import Saver
from pipedream.runtime.engine.prediction import Prediction
from pipedream.runtime.engine.training_segment import Position, whole_updates
from pipedream.runtime.engine.weights import Weights
from pipedream.runtime.local_stage import Rank
from pipedream.runtime.optim.late_gradients import rate_factor, scale_rate
from pipedream.runtime.optim.staleness import delays
from pipedream.runtime.report.clock import Clock
from pipedream.runtime.report.live_table import Display
from pipedream.runtime.report.peak_memory import PeakMemory
from pipedream.runtime.report.recording import Recorder
from pipedream.runtime.report.tensorboard import Board
from pipedream.runtime.stages.partition import links
from pipedream.runtime.supervise.graceful_stop import Halt
from pipedream.runtime.supervise.heartbeat import Pulse
from pipedream.runtime.supervise.watchdog import Watch
from pipedream.schedule.channel import ways


class Member:
    """Made by all ranks at the same time; then each is at `first`, where the run begins.

    `pulse` is there if a launcher of ours watches, else `watch` if there are others; `store` if the
    ranks have met to plan again; `display` on rank 0 alone. `peak_in_flight`: the most minibatches
    that it had between their forward and backward passes. `tried` is what the held-out data gave.
    """

    def __init__(self, rank: Rank, pulse: Pulse | None, store: Store | None = None) -> None:
        job, place = rank.job, rank.place
        self.rank, self.pulse = rank, pulse
        met = store or meet(place, job.timeout)
        self.store = join(place, met, rank.backend, rank.device, job.timeout)
        self.watch = Watch.of(self.store, place, job.timeout) if pulse is None else None
        self.clock = Clock(self.store, place.rank, place.world_size)
        self.clock.read()
        self.recorder = Recorder(self.clock, job.trace, whole_updates(1, job.policy))
        self.groups = make_groups(rank.stage, job.plan.process_ranks, rank.tied)
        ranks = job.plan.process_ranks
        self.transport = Transport(rank.device, rank.backend, ways(ranks, links(rank.layouts)))
        self.stepping = rank.make_stepping(self._add_up)
        self.first = resume(rank, self.stepping) if job.goes_on else Position(0)
        self.saver = self._saver()
        self.weights = self._weights()
        self.halt = self._halt()
        self.memory = PeakMemory(rank.device, rank.tensors())
        self.display = self._display() if place.rank == 0 else None
        self.peak_in_flight = 0
        self.tried: dict[str, float] = {}

    def say(self, words: str) -> None:
        """What this rank does from now on, for those who watch it."""
        if self.pulse is not None:
            self.pulse.say(self.rank.place.rank, words)
        if self.watch is not None:
            self.watch.say(words)

    def _add_up(self, tensor: torch.Tensor) -> None:
        self.transport.begin_sum(tensor, None).wait()

    def _saver(self) -> Saver:
        rank = self.rank
        return Saver(
            folder=rank.job.checkpoints,
            stage=rank.stage,
            stages=len(rank.layouts),
            store=self.store,
            writes=rank.replica == 0,
            publishes=rank.place.rank == 0,
            timeout=rank.job.timeout,
            keep=rank.job.keep,
            recorded=lambda at: self.display is None or self.display.has_recorded(at),
            details={
                "optimizer": rank.job.optimizer.names,
                "batch_size": rank.job.config.batch_size,
            },
        )

    def _halt(self) -> Halt:
        pulse = self.pulse
        return Halt(
            self.store,
            self.rank.place,
            self.rank.job.policy,
            None if pulse is None else lambda: pulse.asked_to_stop,
        )

    def _weights(self) -> Weights:
        """The weights at `first`, with what the config asks for against stale gradients.

        The delays come from the schedule: the last stage has none, and nothing to correct.
        """
        rank, config = self.rank, self.rank.job.config
        minibatches = rank.examples.minibatches
        epoch = rank.schedule(minibatches)
        begun = self.first.minibatch // epoch.policy.round_size(rank.stage)
        updates = self.first.epoch * epoch.rounds(rank.stage) + begun
        if config.asynchronous == AsynchronousConfig():
            return Weights(rank.parameters, updates)
        leg = rank.schedule(min(rank.every or minibatches, minibatches))
        delay = max(delays(leg, rank.stage).values())
        predicting = config.asynchronous.weight_prediction and delay > 0
        prediction = Prediction(rank.optimizer, rank.parameters) if predicting else None
        weights = Weights(rank.parameters, updates, prediction)
        scale_rate(rank.optimizer, lambda: rate_factor(config, delay, weights.current.number))
        return weights

    def _display(self) -> Display:
        job, first = self.rank.job, self.first
        return Display(
            job.run / "metrics.jsonl",
            self.rank.examples.sizes,
            self.rank.examples.minibatches * (job.epochs - first.epoch) - first.minibatch,
            job.plan.process_ranks,
            Board(job.run / "tensorboard", self._learning_rates) if job.tensorboard else None,
            first,
        )

    def _learning_rates(self) -> list[float]:
        """Of each group of parameters."""
        return [float(group["lr"]) for group in self.rank.optimizer.param_groups]
