"""One rank's whole run: set up, train epoch by epoch, save, report."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.nn import Parameter

from pipedream.graph.command import UserError
from pipedream.graph.config import AsynchronousConfig
from pipedream.graph.plan import Simulated
from pipedream.profiler.capture import Captured, capture
from pipedream.profiler.precision import lowered
from pipedream.profiler.segment import Segment
from pipedream.profiler.source import load_config_model, load_data
from pipedream.runtime import checkpoint
from pipedream.runtime.asynchronous import rate_factor, scale_rate
from pipedream.runtime.board import Board
from pipedream.runtime.clock import Clock
from pipedream.runtime.compute import Compute, make_compute
from pipedream.runtime.data import Batch, Epoch, Reader
from pipedream.runtime.delay import delays
from pipedream.runtime.display import Display
from pipedream.runtime.engine import Engine
from pipedream.runtime.evaluate import evaluate
from pipedream.runtime.evaluation import Stage, Tally, obstacle
from pipedream.runtime.exchange import hear, tell
from pipedream.runtime.export import export
from pipedream.runtime.form import Form, Forms, capture_rest
from pipedream.runtime.job import Job
from pipedream.runtime.launch import Place
from pipedream.runtime.legs import Leg, Position, legs, shifted, whole_updates
from pipedream.runtime.live import Status, look, telling
from pipedream.runtime.lock import held
from pipedream.runtime.loss import load_loss
from pipedream.runtime.optimizers import make_optimizer, restore_state, state_tensors
from pipedream.runtime.order import Order
from pipedream.runtime.peak_memory import PeakMemory
from pipedream.runtime.prediction import Prediction
from pipedream.runtime.process import choose_device, join, make_groups, meet
from pipedream.runtime.pulse import Pulse
from pipedream.runtime.randomness import Dice, places, seed_each
from pipedream.runtime.recording import Recorder, Recording
from pipedream.runtime.replan import replanned
from pipedream.runtime.report import (
    Losses,
    seconds_per_minibatch,
    write_summary,
)
from pipedream.runtime.saver import Saver
from pipedream.runtime.schedule import (
    Action,
    Kind,
    Schedule,
    schedule,
)
from pipedream.runtime.share_report import print_shares
from pipedream.runtime.shares import Shares, promised, shares, steady
from pipedream.runtime.sizes import Sizes
from pipedream.runtime.stage import Layout, layouts, links, source_text, tied
from pipedream.runtime.stepping import Stepping
from pipedream.runtime.transport import PeerLost, Transport
from pipedream.runtime.weights import Weights


class Stopped(Exception):
    """The run was asked to stop, has saved and says where."""


def train(job: Job, place: Place, pulse: Pulse | None = None) -> None:
    """Trains as this rank; `pulse` is there if a launcher of ours watches.

    Raises UserError for what the user can mend, PeerLost for lost peers, Stopped when it was asked
    to stop.
    """
    planned, started = job.plan.workers, place.world_size
    if started > planned or (started < planned and job.replan is None):
        raise UserError(
            f"the plan is for {planned} workers and {started} were started: start {planned}, "
            "fewer with --replan, or make another plan with pd-optimize"
        )
    with held(job.run) if place.rank == 0 else nullcontext():
        try:
            store = None
            if started < planned:
                store = meet(place, job.timeout)
                job, place = replanned(job, place, store)
            if place.rank < job.plan.workers:
                Rank(job, place, pulse, store).run()
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise PeerLost("the store of the ranks does not answer any more") from error


class Rank:
    """One rank of a run. All build the same model from the same seed, then keep their stage."""

    def __init__(self, job: Job, place: Place, pulse: Pulse | None, store: Store | None) -> None:
        self.job, self.place, self.pulse, self.met = job, place, pulse, store
        self.stopped: Position | None = None
        self.worker = job.worker(place.rank)
        self.stage, self.replica = self.worker
        self.device, self.backend = choose_device(job.device, place)
        self.kind: str | None = None
        self.data, self.held_out = load_data(job.config, job.directory)
        self.order = Order(self.data, job.config, job.directory)
        self.sizes = self.order.sizes
        self.minibatches = len(self.sizes)
        if self.sizes.examples < job.config.batch_size:
            raise UserError(
                f"{job.config.data.source}: {self.sizes.examples} examples do not fill a batch of "
                f"{job.config.batch_size}: choose a smaller batch_size"
            )
        self._build(*self._capture())

    def _capture(self) -> tuple[Captured, Captured | None]:
        """The model for whole minibatches, and for the last one of an epoch if that is smaller."""
        job = self.job
        torch.manual_seed(job.config.seed)
        model = load_config_model(job.config, job.directory)
        self.persistent = frozenset(model.state_dict())
        self.model_buffers = frozenset(name for name, _ in model.named_buffers())
        before = torch.get_rng_state()
        self.draws = False
        example = self._epoch(0).batch(0)
        self.draws = not torch.equal(torch.get_rng_state(), before)
        self.kind = example.kind
        with lowered(job.config.autocast, torch.device("cpu")):
            captured = capture(model, example.inputs)
            self.layouts: Sequence[Layout] = layouts(captured, job.plan)
            rest = self._capture_rest(model, example, captured)
        self._capture_in_eval(model, example)
        return captured, rest

    def _capture_rest(
        self, model: torch.nn.Module, example: Batch, captured: Captured
    ) -> Captured | None:
        if not self.sizes.rest:
            return None
        try:
            return capture_rest(model, example, self.sizes.rest, captured, self.job.plan)
        except UserError as error:
            raise UserError(
                f"the last minibatch of an epoch has {self.sizes.rest} examples and the others "
                f"{self.sizes.batch_size}, which does not go: {error}; write drop_last: true to "
                f"leave them out, or a batch_size that divides {self.sizes.examples}"
            ) from error

    def _capture_in_eval(self, model: torch.nn.Module, example: Batch) -> None:
        """This rank's part in trying the held-out data; None where it is not asked for or none."""
        job = self.job
        self.trial: Stage | None = None
        if job.config.evaluate_every is None or not job.evaluate:
            return
        if self.held_out is None:
            raise UserError(
                f"evaluate_every: {job.config.data.source} gives no held-out data: leave it out"
            )
        captured, rest = capture(model, example.inputs, training=False), None
        sizes = Sizes(len(self.held_out), job.config.batch_size)
        why = obstacle(captured, job.plan, self._held_out().batch(0), self.kind)
        if why is None and sizes.rest:
            try:
                rest = capture_rest(model, example, sizes.rest, captured, job.plan, training=False)
            except UserError as error:
                why = f"of the last {sizes.rest} of {sizes.examples} examples: {error}"
        model.train()
        if why is None:
            self.trial = Stage.of(captured, rest, job.plan, self.worker, sizes, self.device)
        elif self.place.rank == 0:
            print(
                f"pd-train: the held-out data are tried after training, on one worker: {why}",
                file=sys.stderr,
            )

    def _held_out(self) -> Epoch:
        assert self.held_out is not None
        order = range(len(self.held_out))
        return Epoch(self.held_out, self.job.config, 0, self.device, order=order)

    def _epoch(self, number: int) -> Epoch:
        order = self.order(number)
        return Epoch(self.data, self.job.config, number, self.device, self.kind, self.draws, order)

    def _build(self, captured: Captured, rest: Captured | None) -> None:
        """Keeps this rank's stage of the captured model; the others may go."""
        job = self.job
        self.tied = tied(captured, self.layouts)
        if self.tied and not job.policy.same_everywhere:
            name, stages = next(iter(self.tied.items()))
            raise UserError(
                f"parameter {name} is used in stages {_and(stages)}: with {job.schedule} each "
                "stage would learn its own; use --schedule flush or 2bw, or untie the weights"
            )
        self.layout = self.layouts[self.stage]
        if self.replica == 0:
            job.run.mkdir(parents=True, exist_ok=True)
            text = source_text(captured, job.plan, self.layout, self.layout.build(captured))
            (job.run / f"stage{self.stage}.py").write_text(text, encoding="utf-8")
        if self.place.rank == 0:
            self._forget_other_stages()
        self.dice = Dice(job.config.seed, self.device)
        whole, smaller = self._form(captured), None
        if rest is not None:
            smaller = self._form(rest)
            smaller.share(whole, self.model_buffers)
        self.forms, self.piece = Forms(whole, smaller, self.sizes.last), whole.piece
        self.parameters: dict[str, Parameter] = dict(self.piece.module.named_parameters())
        buffers = self.piece.module.named_buffers()
        self.buffers = {name: buffer for name, buffer in buffers if name in self.persistent}
        self.optimizer = make_optimizer(job.optimizer, self.parameters)
        self.loss = load_loss(job.config.loss, job.directory)

    def _form(self, captured: Captured) -> Form:
        def compute(captured: Captured, piece: Segment) -> Compute:
            seed_each(piece, places(captured.module), self.dice)
            return make_compute(piece, self.job.config, self.device)

        layout = layouts(captured, self.job.plan)[self.stage]
        return Form.of(captured, layout, self.device, compute)

    def _forget_other_stages(self) -> None:
        """The text of stages that an earlier plan of this run had, and this one has not."""
        mine = {f"stage{stage}.py" for stage in range(len(self.layouts))}
        for path in self.job.run.glob("stage*.py"):
            if path.name not in mine:
                path.unlink()

    def run(self) -> None:
        job = self.job
        met = self.met or meet(self.place, job.timeout)
        self.store = join(self.place, met, self.backend, self.device, job.timeout)
        self.clock = Clock(self.store, self.place.rank, self.place.world_size)
        self.clock.read()
        self.recorder = Recorder(self.clock, every_epoch=job.trace)
        self.groups = make_groups(self.stage, job.plan.process_ranks, self.tied)
        self.transport = Transport(self.device, self.backend)
        self.stepping = self._stepping()
        first = self._resume() if job.goes_on else Position(0)
        self.saver = self._saver()
        self.weights = self._weights(first)
        self.memory = PeakMemory(self.device, self._tensors())
        gc.freeze()  # what is there stays; to look through it again and again takes long
        self.times: list[tuple[float, list[float]]] = []
        if self.place.rank == 0:
            total = self.minibatches * (job.epochs - first.epoch) - first.minibatch
            self.display = Display(
                job.run / "metrics.jsonl",
                self.sizes,
                total,
                job.plan.process_ranks,
                Board(job.run / "tensorboard", self._learning_rate) if job.tensorboard else None,
                first,
            )
            with self.display:
                self._epochs(first)
        else:
            self._epochs(first)
        if self.stopped is None:
            self._finish()
        gc.unfreeze()
        dist.destroy_process_group()
        if self.stopped is not None:
            where = job.checkpoints / str(self.stopped)
            raise Stopped(f"saved {where}; go on with --resume")

    def _stepping(self) -> Stepping:
        together = self.job.policy.same_everywhere
        # What replicas hold in common, and tied stages, counts once.
        first = {name: min(stages) == self.stage for name, stages in self.tied.items()}
        counted = [name for name in self.parameters if first.get(name, True)]

        def add_up(tensor: torch.Tensor) -> None:
            self.transport.begin_sum(tensor, None).wait()

        return Stepping(
            self.optimizer,
            self.parameters,
            self.job.config,
            add_up if together else None,
            counted if self.replica == 0 or not together else (),
        )

    def _saver(self) -> Saver:
        return Saver(
            folder=self.job.checkpoints,
            stage=self.stage,
            stages=len(self.layouts),
            store=self.store,
            writes=self.replica == 0,
            publishes=self.place.rank == 0,
            timeout=self.job.timeout,
            keep=self.job.keep,
            recorded=lambda position: self.place.rank > 0 or self.display.recorded >= position,
            details={"optimizer": self.job.optimizer.name},
        )

    @property
    def _every(self) -> int | None:
        """How many minibatches a leg has."""
        every = self.job.save_every
        return None if every is None else whole_updates(every, self.job.policy)

    @cache  # noqa: B019 - lives as long as the process
    def _schedule(self, minibatches: int) -> Schedule:
        plan, config = self.job.plan, self.job.config
        return schedule(
            self.job.schedule,
            plan.replicas,
            links(self.layouts),
            minibatches,
            config.microbatches,
            tied=sorted({stage for stages in self.tied.values() for stage in stages}),
            accumulate=config.accumulate,
        )

    def _weights(self, first: Position) -> Weights:
        """The weights at that position, with what the config asks for against stale gradients.

        The delays come from the schedule: the last stage has none, and nothing to correct.
        """
        job, wanted = self.job, self.job.config.asynchronous
        whole = self._schedule(self.minibatches)
        leg = self._schedule(min(self._every or self.minibatches, self.minibatches))
        delay = max(delays(leg, self.stage).values())
        predicting = wanted.weight_prediction and delay > 0
        weights = Weights(
            self.parameters,
            first.epoch * whole.rounds(self.stage)
            + first.minibatch // whole.round_size(self.stage),
            Prediction(self.optimizer, self.parameters) if predicting else None,
        )
        if wanted != AsynchronousConfig():
            scale_rate(
                self.optimizer, lambda: rate_factor(job.config, delay, weights.current.number)
            )
        return weights

    def _epochs(self, first: Position) -> None:
        for epoch in range(first.epoch, self.job.epochs):
            begin = first.minibatch if epoch == first.epoch else 0
            self._train_epoch(epoch, list(legs(self.minibatches, self._every, begin)))
            if self.stopped is not None:
                break
            done, every = epoch + 1, self.job.config.evaluate_every or 1
            if self.trial is not None and (done % every == 0 or done == self.job.epochs):
                self._evaluate(self.trial, done)
        self.saver.end()

    def _train_epoch(self, epoch: int, ahead: Sequence[Leg]) -> None:
        number = self.dice.epoch = epoch + 1
        first, schedules = ahead[0].begin, {leg: self._schedule(len(leg)) for leg in ahead}
        to_do = {leg: shifted(schedules[leg].actions(self.worker), leg.begin) for leg in ahead}
        actions = [action for leg in ahead for action in to_do[leg]]
        losses = Losses(self.store, number, self.minibatches, first, self.job.config.nan == "stop")
        ends: list[float] = []

        def before(action: Action) -> None:
            if self.pulse is not None:
                words = f"in epoch {number} at {action}, minibatch {action.minibatch}"
                self.pulse.say(self.place.rank, words)

        def after(action: Action) -> None:
            if action.kind is Kind.BACKWARD:
                ends.append(time.perf_counter())

        self.engine = Engine(
            forms=self.forms,
            weights=self.weights,
            stepping=self.stepping,
            transport=self.transport,
            groups=self.groups,
            ranks=self.job.plan.process_ranks,
            loss=self._loss,
            on_loss=losses.tell,
            before=before,
            after=after,
            dice=self.dice,
            per_update=self._per_update(),
            recompute=self.job.plan.stages[self.stage].recompute,
            ahead={
                minibatch + leg.begin: delay
                for leg in ahead
                if self.weights.prediction is not None
                for minibatch, delay in delays(schedules[leg], self.stage).items()
            },
        )
        begin = time.perf_counter()

        def status() -> Status:
            events, ranks = self.engine.events, self.job.plan.process_ranks
            now = time.perf_counter()
            return look(events, actions, ranks, begin, now, self.memory.now())

        shown = self.display.watching(losses) if self.place.rank == 0 else nullcontext()
        told = telling(self.store, self.place.rank, status)
        with shown, told, Reader(self._epoch(number), self._to_read(actions)) as data:
            self._run_legs(to_do, data)
            losses.end()
        self.times.append((time.perf_counter() - begin, ends))
        self.recorder.add(number, self.engine.events)
        self.transport.barrier()
        if self.place.rank == 0:
            self.display.end_epoch(losses)

    def _run_legs(self, to_do: Mapping[Leg, Sequence[Action]], data: Reader) -> None:
        for leg, actions in to_do.items():
            self.memory.begin()
            self.engine.run(actions, data)
            self.memory.end()  # before a checkpoint's copy of the weights: that is not the plan's
            if leg.end < self.minibatches:
                self._save(Position(self.dice.epoch - 1, leg.end))
                if self.stopped is not None:
                    return
        self.stepping.end_epoch()
        self._save(Position(self.dice.epoch))

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        with lowered(self.job.config.autocast, self.device):
            return self.loss(output, target)

    def _per_update(self) -> int:
        """Minibatches that count as one update: of a stage of one replica, if it is by itself."""
        config = self.job.config
        return config.microbatches if self.job.policy.same_everywhere else config.accumulate

    def _learning_rate(self) -> float | None:
        """Of the first group of parameters; some optimizers know none."""
        groups = self.optimizer.param_groups
        return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None

    def _to_read(self, actions: Sequence[Action]) -> list[int]:
        """The minibatches whose inputs or targets this rank needs."""
        if not self.layout.reads and self.stage < len(self.layouts) - 1:
            return []
        return [action.minibatch for action in actions if action.kind is Kind.FORWARD]

    def _evaluate(self, trial: Stage, epoch: int) -> None:
        """The held-out data through the pipeline; rank 0 hears of all losses."""
        held_out, tensors = self._held_out(), {**self.parameters, **self.buffers}
        with torch.no_grad(), Reader(held_out, trial.to_read()) as data:
            tally = trial.run(data, tensors, self.transport, self.loss)
        key = f"held-out/{epoch}"
        tell(self.store, f"{key}/{self.place.rank}", tally.told)
        if self.place.rank == 0:
            told = [hear(self.store, f"{key}/{r}") for r in range(self.place.world_size)]
            self.tried = Tally.result(told)
            self.display.held_out(epoch, epoch * self.minibatches, self.tried)

    def _save(self, position: Position) -> None:
        """Begins to save what this rank has at the end of a leg; the others may be elsewhere."""
        self._average_buffers()
        self.saver.begin(
            position,
            {**self.parameters, **self.buffers},
            lambda: state_tensors(self.optimizer, self.parameters),
            training=self.stepping.state(),
        )
        if self._asked_to_stop(position) and position < Position(self.job.epochs):
            self.stopped = position

    def _asked_to_stop(self, position: Position) -> bool:
        """What rank 0 knows when it comes here. The others wait for it, as the next leg does."""
        if self.pulse is None:
            return False
        key = f"stop/{position}"
        if self.place.rank == 0:
            self.store.set(key, "yes" if self.pulse.asked_to_stop else "no")
        return bool(self.store.get(key) == b"yes")

    def _average_buffers(self) -> None:
        """Batch-norm statistics and the like: the mean over the replicas goes on everywhere."""
        if self.groups.stage is not None and self.buffers:
            count = len(self.job.plan.process_ranks[self.stage])
            sums = {name: buffer.double() for name, buffer in self.buffers.items()}
            self.transport.add_up(list(sums.values()), self.groups.stage)
            for name, buffer in self.buffers.items():
                buffer.copy_(sums[name] / count)

    def _resume(self) -> Position:
        """Loads the newest checkpoint; how far it is."""
        path, optimizer = checkpoint.latest(self.job.checkpoints), self.job.optimizer.name
        if path is None:
            raise UserError(f"--resume: there is no checkpoint in {self.job.checkpoints}")
        saved = checkpoint.read_state(path)
        if saved.epoch >= self.job.epochs and not self.job.restarted:
            raise UserError(
                f"--resume: {path} has all {self.job.epochs} epochs behind it; ask for more with "
                "--epochs"
            )
        if saved.details.get("optimizer", optimizer) != optimizer:
            raise UserError(
                f"--resume: {path} is of a run with optimizer {saved.details['optimizer']}, "
                f"and the config says {optimizer}"
            )
        names = {**self.parameters, **self.buffers}
        with torch.no_grad():
            checkpoint.load_model(path, names)
        restore_state(
            self.optimizer, self.parameters, checkpoint.load_optimizer(path, self.parameters)
        )
        self.stepping.restore(saved.training)
        return saved.position

    def _tensors(self) -> Iterator[torch.Tensor]:
        """What a rank holds between epochs."""
        yield from self.piece.module.parameters()
        yield from self.piece.module.buffers()
        yield from state_tensors(self.optimizer, self.parameters).values()

    def _predicted_memory(self) -> float | None:
        """What the plan says that this rank needs; of another way to train it says nothing."""
        job, plan = self.job, self.job.plan
        counted = bool(plan.weight_prediction) == job.config.asynchronous.weight_prediction
        held = plan.stages[self.stage].memory if job.as_planned and counted else None
        return None if held is None else held.total

    def _finish(self) -> None:
        """Every rank tells what it measured; rank 0 writes it down and tries the model."""
        job = self.job
        mine: dict[str, Any] = {
            "rank": self.place.rank,
            "stage": self.stage,
            "replica": self.replica,
            "peak_memory_bytes": self.memory.bytes,
            "predicted_memory_bytes": self._predicted_memory(),
            "weight_versions": self.weights.peak_versions,
        }
        self.clock.read()
        mine["clock_error_seconds"] = self.clock.error
        tell(self.store, f"report/{self.place.rank}", [mine, self.recorder.told()])
        if self.place.rank == 0:
            heard = [hear(self.store, f"report/{r}") for r in range(self.place.world_size)]
            reports = [report for report, _ in heard]
            recording = Recording.of([told for _, told in heard])
            spent = self._shares(recording, reports)
            recording.write_last(job.run)
            if job.trace:
                recording.write_all(job.run / "trace.json")
                error = max(report["clock_error_seconds"] for report in reports)
                hoped = promised(job.plan) if job.as_planned else {}
                print_shares(spent, job.plan.process_ranks, hoped, self._simulated, error)
            self._write_summary(reports, spent)
        self.transport.barrier()

    def _shares(self, recording: Recording, reports: list[dict[str, Any]]) -> Shares:
        """What the ranks spent their time on; how busy each was is noted in its report."""
        spent = shares(list(recording.epochs.values()), steady(self.job.policy, self.minibatches))
        for report in reports:
            report["busy"] = round(spent.busy(report["rank"]), 4) if recording.epochs else None
        return spent

    def _write_summary(self, reports: list[dict[str, Any]], spent: Shares) -> None:
        job, config = self.job, self.job.config
        replicas = len(job.plan.process_ranks[self.stage])
        first = job.policy.in_flight(self.stage)
        seconds = seconds_per_minibatch(self.times, replicas, first, self.minibatches)
        simulated = self._simulated
        summary: dict[str, Any] = {
            "schedule": job.schedule,
            "epochs": job.epochs,
            "minibatches_per_epoch": self.minibatches,
            "seconds_per_minibatch": seconds,
            "predicted_seconds_per_minibatch": job.plan.predicted.seconds_per_minibatch,
            "simulated_seconds_per_minibatch": simulated and simulated.seconds_per_minibatch,
            "bubble": round(spent.bubble, 4) if spent.seconds else None,
            "simulated_bubble": simulated and simulated.bubble,
            "samples_per_second": config.batch_size / seconds if seconds else 0.0,
            "final_loss": self.display.losses[-1] if self.display.losses else None,
            "ranks": reports,
        }
        if self.trial is not None:
            summary |= self.tried
        elif job.evaluate and self.held_out is not None:
            path = checkpoint.latest(job.checkpoints)
            assert path is not None
            model = load_config_model(config, job.directory)
            summary |= evaluate(model, path, self.held_out, config, self.loss, self.device)
        if job.export is not None:
            self._export(job.export)
        also = "trace.json, " * job.trace + "tensorboard, " * job.tensorboard
        write_summary(job.run, summary, also)

    def _export(self, target: Path) -> None:
        path = checkpoint.latest(self.job.checkpoints)
        assert path is not None
        export(load_config_model(self.job.config, self.job.directory), path, target)

    @property
    def _simulated(self) -> Simulated | None:
        """What the simulation of the plan says; of another schedule it says nothing."""
        return self.job.plan.predicted.simulated if self.job.as_planned else None


def _and(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))
