"""What pd-train was asked to do. Pure: no torch, no processes."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pipedream.graph.choices import DEFAULT_ORDER, ScheduleName
from pipedream.graph.errors import UserError, read_text
from pipedream.graph.model import read_graph
from pipedream.graph.plan import Plan, workers_by_rank
from pipedream.graph.run_config import (
    AUTO,
    METRICS,
    MetricsConfig,
    OptimizerConfig,
    RunConfig,
)
from pipedream.runtime.optim.late_gradients import check_corrections, optimizer_form
from pipedream.runtime.run.training_segment import Position, whole_updates
from pipedream.schedule.action import StageLink, Worker
from pipedream.schedule.orders.auto import has_room
from pipedream.schedule.orders.named import ROUND_ORDERS
from pipedream.schedule.policy import Policy, policy, uniform_updates
from pipedream.schedule.schedule import ORDERS
from pipedream.schedule.spec import PipelineSpec, in_order_of

CHECKPOINTS = "checkpoints"
"""Folder name in that of the run."""

EVALUATION = "evaluation.json"
"""What --evaluate-only writes into the folder of the run."""

SUMMARY = "summary.json"
"""File name in the folder of the run: the last that it writes but an export."""


@dataclass(frozen=True)
class Job:
    """What pd-train was asked to do. `directory`: the run config's; `run`: where results go.

    `restarted`: the launcher has started it again after a failure. `replan`: the plan.json to plan
    again from if there are fewer workers than the plan has; None to refuse that. `retune`: that to
    plan again from by what the run measures; None not to. `plan_folder`: where plan.json is, if
    anywhere. `unchecked`: the passes of the pipeline are not compared with those of the model
    first.
    """

    plan: Plan
    config: RunConfig
    directory: Path
    run: Path
    device: str = "cpu"
    schedule: ScheduleName = "weight-stashing"
    epochs: int = 1
    resume: bool = False
    restarted: bool = False
    timeout: float = 300.0
    evaluate: bool = True
    trace: bool = False
    tensorboard: bool = False
    save_every: int | None = None
    keep: int | None = None
    export: Path | None = None
    init: Path | None = None
    init_optimizer: bool = True
    replan: Path | None = None
    retune: Path | None = None
    plan_folder: Path | None = None
    evaluate_only: bool = False
    checkpoint: Path | None = None
    unchecked: bool = False

    @property
    def checkpoints(self) -> Path:
        return self.run / CHECKPOINTS

    @property
    def policy(self) -> Policy:
        return policy(self.spec())

    def spec(
        self, links: Collection[StageLink] = (), tied: Mapping[str, Sequence[int]] | None = None
    ) -> PipelineSpec:
        """Returns the pipeline; its `links` and `tied` stages are known when the model is captured.

        The plan's bounds on minibatches in flight hold only for the schedule it was made for.
        """
        planned, config = self.schedule == self.plan.schedule, self.config
        spec = PipelineSpec(
            self.schedule,
            self.plan.replicas,
            tuple(sorted(links)),
            config.microbatches,
            config.accumulate,
            self.plan.max_in_flight if planned else None,
            tuple(sorted({stage for stages in (tied or {}).values() for stage in stages})),
            joint_norm=config.watches_norm and uniform_updates(self.schedule),
        )
        return in_order_of(self.plan, spec)

    @property
    def segment_minibatches(self) -> int | None:
        """How many minibatches there are between checkpoints; None: those of an epoch."""
        every = self.save_every
        return None if every is None else whole_updates(every, self.policy)

    @property
    def order(self) -> str:
        """In which order a rank does its passes, by its name in `schedule.ORDERS`."""
        return self.plan.order or DEFAULT_ORDER

    @property
    def as_planned(self) -> bool:
        """Whether the schedule is the one that the plan's figures are for."""
        planned = self.plan.predicted.microbatches
        return self.schedule == self.plan.schedule and planned in (None, self.config.microbatches)

    @property
    def has_planned_batch(self) -> bool:
        """Whether minibatches have the size that the plan was made for, as far as it says so."""
        return self.plan.batch_size in (None, self.config.batch_size)

    @property
    def has_planned_compile(self) -> bool:
        """Whether stages are compiled as those that were measured for the plan."""
        return self.plan.compile == self.compile_backend

    @property
    def is_comparable(self) -> bool:
        """Whether the plan's times are for such a run."""
        return self.as_planned and self.has_planned_batch

    @property
    def compile_backend(self) -> str | None:
        """Returns torch.compile's backend, None for none: that of the config, or of the plan."""
        asked = self.config.compile_backend
        return self.plan.compile if asked == AUTO else asked

    @property
    def optimizer(self) -> OptimizerConfig:
        """The config's optimizer, or the form of it that is asked for."""
        return optimizer_form(self.config.optimizer, self.config.asynchronous)

    @property
    def optimizer_names(self) -> str:
        """Returns what learns, for checkpoints and messages."""
        rotated = self.config.asynchronous.basis_rotation is not None
        own = self.config.optimizer.names
        return f"{own} with basis_rotation" if rotated else self.optimizer.names

    def divides_updates(self, stage: int) -> bool:
        """Returns whether the replicas of a stage divide the optimizer's state among them."""
        planned, asked = self.plan.stages[stage], self.config.zero
        return planned.replicas > 1 and (planned.zero if asked is None else asked)

    def check(self) -> None:
        """Makes the run's folder. Raises UserError if the job is impossible."""
        self.check_order()
        self.check_recordings()
        self.check_microbatches()
        self.check_asynchronous()
        self.check_zero()
        self.check_scheduler()
        self.check_evaluation()
        self.check_scale()
        self.check_replan()
        self.check_retune()
        self.check_folder()
        self.check_export()
        self.check_init()
        self.check_metrics()

    def check_order(self) -> None:
        """Raises UserError if the plan's order of passes is unknown, or not for such a run."""
        if self.order not in ORDERS:
            raise UserError(f"order {self.order!r} of the plan is not known: {', '.join(ORDERS)}")
        rules = ROUND_ORDERS.get(self.order)
        spec = self.spec(self.plan.links)
        misfit = None if rules is None else rules.misfit(spec)
        if misfit is not None:
            raise UserError(f"order {self.order} of the plan {misfit}: make one with pd-optimize")
        times = self.plan.order_times
        if self.order == "auto" and times is not None and not has_room(spec):
            most = max(sum(times.held_bytes[stage] for stage in own) for own in spec.places)
            raise UserError(
                f"order auto of the plan: limit_bytes {times.limit_bytes:.0f} has no room for one "
                f"microbatch, of which a rank holds {most:.0f}: make a plan with smaller "
                "microbatches, or for more memory, with pd-optimize"
            )

    def check_recordings(self) -> None:
        """Raises UserError for what passes that were recorded cannot do."""
        if not self.config.records_passes:
            return
        why = None
        if self.device.partition(":")[0] != "cuda":
            why = f"passes are recorded on GPUs, and the device is {self.device}"
        elif self.schedule not in ("flush", "gpipe"):
            why = f"weights stay where they are with flush and gpipe, not with {self.schedule}"
        elif any(stage.mesh is not None for stage in self.plan.stages):
            why = "stages on a mesh of devices are not recorded"
        if why is not None:
            name = "cuda_graphs" if self.config.cuda_graphs else "compile: reduce-overhead"
            raise UserError(f"{name}: {why}: remove it from the run config")

    def check_asynchronous(self) -> None:
        """Raises UserError if there is nothing asynchronous to correct, or no delay is known."""
        check_corrections(self.config.asynchronous, self.schedule, self.order)
        _ = self.optimizer

    def check_zero(self) -> None:
        """Raises UserError where the optimizer's state cannot be divided over replicas."""
        divided = [each for each in self.plan.stages if self.divides_updates(each.stage)]
        if not divided:
            return
        why, optimizer = None, self.optimizer.not_elementwise
        if self.config.asynchronous.basis_rotation is not None:
            why = "replicas update parts of parameters, and basis_rotation needs whole matrices"
        elif optimizer is not None:
            why = f"replicas update parts of parameters, and {optimizer} may have to see whole ones"
        elif self.config.asynchronous.weight_prediction:
            why = "replicas know the last step of parts alone, and weight_prediction needs all"
        elif any(tuple(sorted(stage.ranks)) != stage.ranks for stage in divided):
            why = "the plan does not have the ranks of each stage in ascending order"
        if why is not None:
            raise UserError(f"zero: {why}: write zero: false in the run config")

    def check_scheduler(self) -> None:
        """Raises UserError if it needs held-out data that are not evaluated between epochs."""
        scheduler, tried = self.config.scheduler, self.config.evaluate_every and self.evaluate
        if scheduler is not None and scheduler.needs_held_out and not tried:
            raise UserError(
                f"scheduler {scheduler.name}: metric: {scheduler.metric} is known where the "
                "held-out data are tried between epochs: write evaluate_every: 1 in the run config"
                + ", and leave --no-evaluate out"
                * (not self.evaluate)
            )

    def check_evaluation(self) -> None:
        """Raises UserError if the held-out data cannot be evaluated as it is asked for."""
        config = self.config
        if config.evaluate_every is not None and config.data.varying and self.evaluate:
            raise UserError(
                "evaluate_every: minibatches of varying shapes are evaluated after the run only: "
                "leave it out"
            )
        if not self.evaluate_only:
            if self.checkpoint is not None:
                raise UserError("--checkpoint: give --evaluate-only, which evaluates it")
            return
        if self.checkpoint is None and self.saved is None:
            raise UserError(
                f"--evaluate-only: there is no checkpoint in {self.checkpoints}: give the folder "
                "of a run with -o, or one with --checkpoint"
            )
        if self.checkpoint is not None and not (self.checkpoint / "state.json").exists():
            raise UserError(
                f"--checkpoint {self.checkpoint}: this is no checkpoint of a run, such as "
                f"{self.checkpoints}/epoch-0001"
            )

    def check_microbatches(self) -> None:
        """Raises UserError if the schedule needs more of them than the run config has."""
        least, count = self.policy.least_microbatches, self.config.microbatches
        if count < least:
            raise UserError(
                f"schedule {self.schedule}: the run config has microbatches: {count}, and stages of"
                f" {', '.join(map(str, self.plan.replicas))} workers need at least {least}, as many"
                f" as are in flight: write microbatches: {least} or more"
            )

    def check_scale(self) -> None:
        """Raises UserError if the loss scale would be found too late for the other stages."""
        config = self.config
        searched = config.autocast == "float16" and config.loss_scale is None
        if searched and not self.policy.drains:
            raise UserError(
                f"schedule {self.schedule}: with autocast: float16 the run config has to say the "
                "loss_scale, say 1024; flush and gpipe find it by themselves"
            )

    @property
    def saved(self) -> Position | None:
        """The position of the newest checkpoint."""
        positions = (Position.of(path.name) for path in self.checkpoints.glob("epoch-*"))
        return max((position for position in positions if position is not None), default=None)

    @property
    def has_summary(self) -> bool:
        """Whether the run has all its epochs behind it, and has written what they came to."""
        try:
            return bool(json.loads(read_text(self.run / SUMMARY))["epochs"] >= self.epochs)
        except (UserError, ValueError, TypeError, LookupError, RecursionError):
            return False

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.has_summary and (self.export is None or self.export.exists())

    @property
    def goes_on(self) -> bool:
        """Whether the run begins at a checkpoint.

        If the launcher has restarted it, the checkpoints are its own; it may have none yet.
        """
        return self.resume or (self.restarted and self.saved is not None)

    def check_replan(self) -> None:
        """Raises UserError if there would be nothing to plan from."""
        if self.replan is not None:
            self._check_graph("--replan", self.replan)

    def check_retune(self) -> None:
        """Raises UserError if there would be nothing to plan from, nothing to compare, or no
        checkpoint to go on from.
        """
        if self.retune is None:
            return
        self._check_graph("--retune", self.retune)
        if not self.is_comparable or not self.has_planned_compile:
            raise UserError(
                f"--retune: {self.retune} is for another schedule, batch size, number of"
                " microbatches or way to compile than the run's: make a plan for those first"
            )
        if self.epochs == 1 and self.save_every is None:
            raise UserError(
                "--retune: the run has one epoch, and no checkpoint before its end: give"
                " --save-every"
            )

    def _check_graph(self, option: str, path: Path) -> None:
        """Raises UserError if there is no graph, or another, beside the plan in `path`."""
        graph = path.with_name("graph.txt")
        if not graph.exists():
            raise UserError(
                f"{option}: there is no {graph}: pd-optimize writes it with plan.json; keep them "
                "together"
            )
        if read_graph(graph).fingerprint != self.plan.graph.fingerprint:
            raise UserError(f"{option}: {graph} is not the graph that {path} was made from")

    def check_folder(self) -> None:
        """Creates the folder. Raises UserError if it cannot, or if it has another's checkpoints."""
        try:
            self.run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"-o {self.run}: cannot be created: {error.strerror}") from error
        if not os.access(self.run, os.W_OK | os.X_OK):
            raise UserError(f"-o {self.run}: cannot be written: Permission denied")
        if self.saved is not None and not self.goes_on and not self.evaluate_only:
            raise UserError(
                f"-o {self.run}: there are checkpoints of an earlier run; go on with --resume, "
                "or give another folder"
            )

    def check_export(self) -> None:
        """Raises UserError if the trained model could not be written."""
        if self.export is None:
            return
        probe = self.export.with_name(f"{self.export.name}.{os.getpid()}.partial")
        try:
            self.export.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
            occupied = self.export.is_dir() and any(self.export.iterdir())
        except OSError as error:
            raise UserError(
                f"--export {self.export}: cannot be written: {error.strerror}"
            ) from error
        if self.export.is_dir() and self.export.suffix == ".safetensors":
            raise UserError(f"--export {self.export}: this is a folder: give the name of a file")
        if occupied and not self.restarted:
            raise UserError(
                f"--export {self.export}: this folder has files in it: give another name"
            )

    def check_init(self) -> None:
        """Raises UserError if the run does not begin, or its beginning is not there."""
        if self.init is None:
            if not self.init_optimizer:
                raise UserError("--no-init-optimizer: give --init, a folder to begin with")
            return
        if self.resume:
            raise UserError(
                "--init: a run that is resumed has weights of its own: leave --init or --resume out"
            )

    @property
    def metrics(self) -> tuple[MetricsConfig, ...]:
        """Who gets what the run measures, by the run config and --tensorboard."""
        named = self.config.metrics
        if not self.tensorboard or any(each.source == "tensorboard" for each in named):
            return named
        return (*named, MetricsConfig(source="tensorboard"))

    def check_metrics(self) -> None:
        """Raises UserError if a package that is asked for is not installed."""
        for name in (each.source for each in self.metrics):
            if name in METRICS and find_spec(name) is None:
                raise UserError(f"metrics {name}: the package is missing: pip install {name}")

    def workers_of(self, rank: int) -> list[Worker]:
        """Returns the replicas of stages that this rank runs, in the order of the stages."""
        return workers_by_rank(self.plan.rank_assignment)[rank]
