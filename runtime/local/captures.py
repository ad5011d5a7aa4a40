"""The model of a run, captured in each way in which it will run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn

from pipedream.capture.captured import Captured
from pipedream.capture.checks.equivalence import Tolerance, check_equivalence
from pipedream.capture.compute_settings import Precision, eval_mode
from pipedream.capture.export import capture
from pipedream.capture.loss import load_loss
from pipedream.capture.programs.parameter_roles import Role, is_matrix, roles
from pipedream.capture.sources.load import load_config_model
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import MUON, OptimizerConfig
from pipedream.runtime.data.batch import Batch
from pipedream.runtime.data.examples import Examples
from pipedream.runtime.data.order import Sizes
from pipedream.runtime.engine.evaluation import Evaluation, obstacle
from pipedream.runtime.optim.muon import roles_by_shape, who_learns, with_others
from pipedream.runtime.optim.optimizers import make_optimizer
from pipedream.runtime.optim.rates import LearningRate
from pipedream.runtime.run.job import Job
from pipedream.runtime.stages.partition import interfaces
from pipedream.runtime.stages.stage_module import capture_rest


@dataclass(frozen=True)
class Captures:
    """The model as captured. `whole`: for full minibatches; `smaller`: for the last one of an
    epoch, by its number, if that has fewer examples.

    `parameters`: the names of all that the model has; `persistent`: those in its state_dict;
    `buffers`: those of all its buffers. `roles`: what each parameter is for, where Muon learns.
    `evaluation`: a rank's part in evaluating the held-out data, None if that is not asked for or
    cannot go through the pipeline. `model`: if minibatches vary in shape, to capture it for others.
    `first`: the minibatch it was captured for. `tolerance`: by how much the passes of the pipeline
    may differ from the model's, if that was looked at.
    """

    whole: Captured
    smaller: Mapping[int, Captured]
    parameters: Sequence[str]
    persistent: Set[str]
    buffers: Set[str]
    roles: Mapping[str, Role]
    evaluation: Evaluation | None
    first: Batch
    model: nn.Module | None = None
    tolerance: Tolerance | None = None

    def optimizer_of(self, job: Job) -> OptimizerConfig:
        """Returns the job's optimizer, with all its groups. Raises UserError."""
        return with_others(job.optimizer, self.roles)

    def learners_of(self, job: Job) -> str | None:
        """Returns what Muon and others learn, in words; None without Muon. Raises UserError."""
        parameters = self.whole.module.named_parameters()
        learned = [name for name, parameter in parameters if parameter.requires_grad]
        return who_learns(self.optimizer_of(job), self.roles, learned)


def capture_all(job: Job, examples: Examples, rank_info: RankInfo) -> Captures:
    """Returns the same on all ranks, but for `evaluation`. Raises UserError if it cannot."""
    model = load_config_model(job.config, job.directory, names=examples.input_names)
    _check_config(job, examples, model)
    first = examples.first()
    precision = Precision(job.config.autocast, examples.device)
    whole = capture(model, first.inputs, precision=precision)
    rest = _rest(job, examples, model, first, whole)
    tolerance = None
    if rank_info.rank == 0 and not job.unchecked:
        if rest is not None:
            _check(job, model, rest, first.first(examples.sizes.rest))
        tolerance = _check(job, model, whole, first)
    return Captures(
        whole,
        {} if rest is None or examples.sizes.last is None else {examples.sizes.last: rest},
        [name for name, _ in model.named_parameters()],
        frozenset(model.state_dict()),
        frozenset(name for name, _ in model.named_buffers()),
        _roles(model, whole) if MUON in job.optimizer.names else {},
        _evaluation(job, examples, rank_info, model, first),
        first,
        model if job.config.data.varying else None,
        tolerance,
    )


def _check_config(job: Job, examples: Examples, model: nn.Module) -> None:
    """Raises UserError for what is asked for in vain: before the capture, which takes long."""
    wanted = job.evaluate_only or (job.config.evaluate_every is not None and job.evaluate)
    if wanted and examples.held_out is None:
        option = "--evaluate-only" if job.evaluate_only else "evaluate_every"
        reason = f"{job.config.data.source} gives no held-out data"
        raise UserError(f"{option}: {reason}{': leave it out' * (not job.evaluate_only)}")
    parameters = dict(model.named_parameters())
    config = with_others(job.optimizer, roles_by_shape(parameters))
    optimizer = make_optimizer(config, parameters)
    LearningRate(job.config.scheduler, optimizer, job.directory)


def _roles(model: nn.Module, captured: Captured) -> dict[str, Role]:
    """Returns those of all parameters, of which operators may not read some."""
    unread = {
        name: Role.OTHER_MATRIX if is_matrix(parameter) else Role.NO_MATRIX
        for name, parameter in model.named_parameters()
    }
    return unread | roles(captured)


def _check(job: Job, model: nn.Module, captured: Captured, batch: Batch) -> Tolerance | None:
    """Compares what was captured for this minibatch with the model. Raises UserError."""
    loss = load_loss(job.config.loss, job.directory)
    return check_equivalence(
        model, captured, batch.inputs, {}, lambda output: loss(output, batch.target)
    )


def _rest(
    job: Job, examples: Examples, model: nn.Module, first: Batch, whole: Captured
) -> Captured | None:
    sizes = examples.sizes
    if not sizes.rest or job.config.data.varying:
        return None
    interfaces(whole, job.plan)  # first of all it has to be the model that was planned
    try:
        return capture_rest(model, first, sizes.rest, whole, job.plan)
    except UserError as error:
        raise UserError(
            f"for the last minibatch of an epoch, {sizes.rest} in place of {sizes.batch_size} "
            f"examples, {error}; write drop_last: true to leave them out, or a batch_size that "
            f"divides {sizes.examples}"
        ) from error


def _evaluation(
    job: Job, examples: Examples, rank_info: RankInfo, model: nn.Module, first: Batch
) -> Evaluation | None:
    if job.config.evaluate_every is None or not job.evaluate:
        return None
    assert examples.held_out is not None, "checked before"
    precision = Precision(device=examples.device)
    captured, rest = capture(model, first.inputs, training=False, precision=precision), None
    sizes = Sizes(len(examples.held_out), job.config.batch_size)
    why = obstacle(captured, job.plan, examples.to_try().batch(0), examples.kind)
    if why is None and sizes.rest:
        try:
            rest = capture_rest(model, first, sizes.rest, captured, job.plan, training=False)
        except UserError as error:
            why = f"for the last {sizes.rest} of {sizes.examples} examples {error}"
    if why is None:
        if rank_info.rank == 0 and not job.unchecked:
            with eval_mode(model):
                check_equivalence(model, captured, first.inputs, {})
        workers = job.workers_of(rank_info.rank)
        return Evaluation.of(captured, rest, job.plan, workers, sizes)
    scheduler = job.config.scheduler
    if scheduler is not None and scheduler.needs_held_out:
        raise UserError(
            f"scheduler {scheduler.name}: metric: {scheduler.metric}: the held-out data do not go "
            f"through the pipeline, {why}: write metric: loss"
        )
    if rank_info.rank == 0:
        print(
            f"pd-train: the held-out data are evaluated after training, on one worker: {why}",
            file=sys.stderr,
        )
    return None
