"""measured.json: what the passes of a run took, stage by stage. `pipedream-measured/1`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from pipedream.graph.choices import ScheduleName
from pipedream.graph.errors import ArtifactModel, read_artifact
from pipedream.graph.plan import Amount, Plan, workers_by_rank
from pipedream.graph.profile import Quartiles

MEASURED = "measured.json"
"""Its name in the run's folder."""


class MeasuredRank(ArtifactModel):
    """One rank, in the steady part of the run: so many `minibatches` and `updates` were counted.

    `forward` and `backward` are of one minibatch. In the last stage the loss is within both; where
    the plan has `recompute` for the stage, `backward` has the second forward pass in it. `update`
    is one step of the optimizer, `all_reduce` what it waits for the sum of a round of gradients.
    `sending` and `waiting`: what handing over, and getting, the messages of one minibatch took.
    None where there were none.
    """

    rank: int = Field(ge=0)
    stage: int = Field(ge=0)
    replica: int = Field(ge=0)
    minibatches: int = Field(ge=1)
    forward: Quartiles
    backward: Quartiles
    updates: int = Field(ge=0)
    update: Quartiles | None = None
    all_reduce: Quartiles | None = None
    sending: Quartiles | None = None
    waiting: Quartiles | None = None

    @property
    def busy_seconds(self) -> float:
        """Passes and its part of an update, of one of the rank's own minibatches."""
        passes = self.forward.median + self.backward.median
        step = 0.0 if self.update is None else self.update.median
        return passes + step * self.updates / self.minibatches


class MeasuredRun(ArtifactModel):
    """A run on the CPU or on GPUs, in minibatches of `batch_size` examples; and its plan.

    On a GPU a pass is timed when it is given to the device, not when it is done. `threads`: of
    torch, for one operator on the CPU. `schedule` is the one that was trained with.
    `seconds_per_minibatch`: of the whole pipeline, while it did the minibatches that were counted.
    `plan` has the nodes of each stage and the fingerprint of the graph; what it names by a path is
    meant from the run's folder.
    """

    format: Literal["pipedream-measured/1"] = "pipedream-measured/1"
    device: str
    threads: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    schedule: ScheduleName
    seconds_per_minibatch: Amount
    ranks: tuple[MeasuredRank, ...] = Field(min_length=1)
    plan: Plan

    @model_validator(mode="after")
    def _check(self) -> MeasuredRun:
        by_rank = workers_by_rank(self.plan.rank_assignment)
        workers = [(rank, *worker) for rank, listed in by_rank.items() for worker in listed]
        told = [(rank.rank, rank.stage, rank.replica) for rank in self.ranks]
        if sorted(told) != sorted(workers):
            raise ValueError("the ranks are not those of the plan")
        return self

    def of_stage(self, stage: int) -> tuple[MeasuredRank, ...]:
        """Its replicas."""
        return tuple(rank for rank in self.ranks if rank.stage == stage)

    @property
    def slowest(self) -> tuple[int, float]:
        """The stage that computes longest for each minibatch of the pipeline, and how long."""
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
    path.write_text(text + "\n", encoding="utf-8")
