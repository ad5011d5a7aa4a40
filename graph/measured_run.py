"""measured.json: the measured times of a run, rank by rank. Format `pipedream-measured/1`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from pipedream.graph.choices import ScheduleName
from pipedream.graph.command import write_whole
from pipedream.graph.errors import ArtifactModel, read_artifact
from pipedream.graph.plan import Amount, Plan, workers_by_rank
from pipedream.graph.profile import Quartiles

MEASURED = "measured.json"
"""File name in the folder of the run."""


class MeasuredRank(ArtifactModel):
    """Times of one stage of a rank in the steady state of the run. None if there were none."""

    rank: int = Field(ge=0)
    stage: int = Field(ge=0)
    replica: int = Field(ge=0)
    minibatches: int = Field(ge=1)
    """How many were counted."""
    forward: Quartiles
    """Seconds per minibatch; in the last stage with the loss."""
    backward: Quartiles
    """Seconds per minibatch; with the second forward pass if the stage recomputes."""
    updates: int = Field(ge=0)
    """How many were counted."""
    update: Quartiles | None = None
    """One step of the optimizer."""
    all_reduce: Quartiles | None = None
    """Waiting for the sum of one round of gradients, and for the norm of the whole model's."""
    sending: Quartiles | None = None
    """Handing over the messages of one minibatch."""
    waiting: Quartiles | None = None
    """Waiting for the messages of one minibatch."""

    peak_memory_bytes: Amount | None = None
    """The most that the rank held of memory in training, without what it had before any tensor;
    None if it was not trained as planned."""

    @property
    def busy_seconds(self) -> float:
        """Returns the seconds of passes and a share of the update, per minibatch of the rank."""
        passes = self.forward.median + self.backward.median
        step = 0.0 if self.update is None else self.update.median
        return passes + step * self.updates / self.minibatches


class MeasuredRun(ArtifactModel):
    """The measured times of a run, with its plan."""

    format: Literal["pipedream-measured/1"] = "pipedream-measured/1"
    device: str
    """`cpu` or `cuda`, with times as its stream came to each action."""
    threads: int = Field(ge=1)
    """CPU threads of one operator."""
    batch_size: int = Field(ge=1)
    """Examples in a minibatch."""
    schedule: ScheduleName
    """The one that was trained."""
    seconds_per_minibatch: Amount
    """Of the whole pipeline in the steady state."""
    ranks: tuple[MeasuredRank, ...] = Field(min_length=1)
    """One entry for each stage of each rank."""
    plan: Plan
    """Its paths are relative to the folder of the run."""

    @model_validator(mode="after")
    def _check(self) -> MeasuredRun:
        by_rank = workers_by_rank(self.plan.rank_assignment)
        workers = [(rank, *worker) for rank, listed in by_rank.items() for worker in listed]
        measured = [(rank.rank, rank.stage, rank.replica) for rank in self.ranks]
        if sorted(measured) != sorted(workers):
            raise ValueError("the ranks are not those of the plan")
        return self

    def of_stage(self, stage: int) -> tuple[MeasuredRank, ...]:
        """Returns the ranks of a stage."""
        return tuple(rank for rank in self.ranks if rank.stage == stage)

    @property
    def noise(self) -> float:
        """Returns by how much, relative, the passes of the stage of which least is known may differ
        from those that were measured: the notch of a box plot, a 95 % confidence interval of the
        median (McGill, Tukey and Larsen, 1978).
        """
        passes = ((rank, each) for rank in self.ranks for each in (rank.forward, rank.backward))
        notches: dict[tuple[int, int, int], float] = {}
        for rank, each in passes:
            worker = rank.rank, rank.stage, rank.replica
            notch = 1.57 * (each.upper - each.lower) / rank.minibatches**0.5
            notches[worker] = notches.get(worker, 0.0) + notch
        busy = {(rank.rank, rank.stage, rank.replica): rank.busy_seconds for rank in self.ranks}
        return max((notches[w] / busy[w] for w in busy if busy[w]), default=0.0)

    @property
    def slowest(self) -> tuple[int, float]:
        """Returns the stage with the most compute time per minibatch of the pipeline, and that."""
        busy = {
            rank.stage: rank.busy_seconds / self.plan.stages[rank.stage].replicas
            for rank in sorted(self.ranks, key=lambda rank: rank.busy_seconds)
        }
        stage = max(busy, key=busy.__getitem__)
        return stage, busy[stage]


def read_measured(path: Path) -> MeasuredRun:
    """Reads measured.json. Raises UserError `FILE: where: what is wrong`."""
    return read_artifact(path, MeasuredRun)


def write_measured(measured: MeasuredRun, path: Path) -> None:
    text = measured.model_dump_json(indent=1, exclude_none=True)
    write_whole(path, text + "\n")
