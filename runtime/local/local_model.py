"""A rank before it meets the others: the data, and its stages of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from pipedream.capture.loss import load_loss, load_metrics
from pipedream.comm.rank_info import RankInfo
from pipedream.comm.rendezvous import choose_device
from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.graph.errors import UserError
from pipedream.graph.plan import workers_by_rank
from pipedream.runtime.data.examples import Examples
from pipedream.runtime.local.captures import Captures, capture_all
from pipedream.runtime.local.local_stage import LocalStage
from pipedream.runtime.run.job import Job
from pipedream.runtime.run.training_segment import training_segments, whole_updates
from pipedream.runtime.stages.partition import interfaces, links, tied
from pipedream.runtime.stages.randomness import MinibatchRng
from pipedream.runtime.stages.stage_forms import CapturedStages
from pipedream.schedule.action import Action
from pipedream.schedule.checker import UnsoundError, check_ranks
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec


class LocalModel:
    """All ranks build the same model from the same seed; each keeps the `stages` that it runs.

    `learners`: who learns what, where Muon learns. `captures`: on rank 0 the whole model, until the
    stages have been compared with it.
    """

    def __init__(self, job: Job, rank_info: RankInfo) -> None:
        self.job, self.rank_info = job, rank_info
        self.workers = job.workers_of(rank_info.rank)
        self.device, self.backend = choose_device(job.device, rank_info)
        self.examples = Examples(job, self.device)
        self.rng = MinibatchRng(job.config.seed, self.device)
        self.loss = load_loss(job.config.loss, job.directory)
        self.metrics = load_metrics(job.config.held_out_metrics, job.directory)
        captures = capture_all(job, self.examples, rank_info)
        self.first = captures.first
        self.learners = captures.learners_of(job)
        self.captures = captures if rank_info.rank == 0 and not job.unchecked else None
        self._build(captures)

    def _build(self, captures: Captures) -> None:
        """Keeps this rank's stages of the captured model; the others are freed."""
        job = self.job
        self.interfaces = interfaces(captures.whole, job.plan)
        self.tied = tied(captures.whole, self.interfaces)
        self.spec = job.spec(links(self.interfaces), self.tied)
        check_stages(job, self.spec, self.tied, self.examples.minibatches)
        forms = self._forms(captures)
        self.stages = tuple(
            LocalStage(
                job,
                worker,
                captures,
                self.interfaces[worker[0]],
                self.rng,
                self.tied,
                forms,
                job.plan.rank_assignment[worker[0]][worker[1]].ranks.index(self.rank_info.rank),
                self.loss,
            )
            for worker in self.workers
        )
        if self.rank_info.rank == 0:
            self._forget_other_stages()
        self.evaluation = captures.evaluation
        if self.evaluation is not None:
            trained = {stage.stage: stage.stage_modules.usual for stage in self.stages}
            self.evaluation.join_meshes(trained)

    def _forms(self, captures: Captures) -> CapturedStages | None:
        """Returns the stages of this rank in other forms, if minibatches vary in shape."""
        if captures.model is None:
            return None
        return CapturedStages(
            captures.model,
            self.job.plan,
            [stage for stage, _ in self.workers],
            self.rng,
            captures.whole.precision,
            backend=self.job.compile_backend,
            first=captures.whole,
            checked=self.rank_info.rank == 0 and not self.job.unchecked,
        )

    def _forget_other_stages(self) -> None:
        """Deletes the text of stages that an earlier plan of this run had, and this one has not."""
        kept = {f"stage{stage}.py" for stage in range(len(self.interfaces))}
        for path in self.job.run.glob("stage*.py"):
            if path.name not in kept:
                path.unlink()

    @cache  # noqa: B019 - lives as long as the process
    def actions(self, minibatches: int) -> Sequence[Action]:
        """Returns what this rank does in so many minibatches; others' passes are not kept."""
        return self.schedule(minibatches).actions(*self.workers)

    def schedule(self, minibatches: int) -> Schedule:
        """Returns that of so many minibatches, from an empty pipeline to an empty one."""
        return Schedule(self.spec, minibatches)

    @property
    def segment_minibatches(self) -> int:
        """The minibatches of the longest segment."""
        whole = self.examples.minibatches
        return min(self.job.segment_minibatches or whole, whole)


_MOST_CHECKED = 1_000
"""Minibatches of an order that is proved sound before a run: they take less than a second."""


def check_stages(
    job: Job, spec: PipelineSpec, tied: Mapping[str, Sequence[int]], minibatches: int
) -> None:
    """Checks a run of this pipeline whose epochs have so many minibatches.

    `tied`: the stages that hold a parameter, by its name, where there are several. Raises UserError
    where they cannot learn it together, or the ranks would wait for one another.
    """
    _check_tied(job, tied)
    if job.order != DEFAULT_ORDER:
        most = whole_updates(_MOST_CHECKED, job.policy)
        segments = training_segments(minibatches, job.segment_minibatches)
        for count in {min(len(segment), most) for segment in segments}:
            _check_order(job, Schedule(spec, count))


def _check_tied(job: Job, tied: Mapping[str, Sequence[int]]) -> None:
    teams = job.plan.rank_assignment
    ranks = [[rank for team in stage for rank in team.ranks] for stage in teams]
    for name, stages in tied.items():
        problem = job.policy.unshared(name, stages, ranks)
        if problem is not None:
            raise UserError(problem)


def _check_order(job: Job, schedule: Schedule) -> None:
    workers = workers_by_rank(job.plan.rank_assignment)
    try:
        actions = {rank: schedule.actions(*own) for rank, own in workers.items()}
        check_ranks(schedule, actions, job.plan.rank_assignment)
    except (UnsoundError, AssertionError) as error:
        problem = (str(error) or "it does not fit").splitlines()[0]
        raise UserError(
            f"order {job.order} of the plan, for {schedule.minibatches} minibatches: {problem}"
        ) from error
