"""measured.json: the measured times of a run, rank by rank. Format `pipedream-measured/1`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from pipedream.graph.choices import ScheduleName
from pipedream.graph.errors import ArtifactModel, read_artifact
from pipedream.graph.plan import Amount, Plan, workers_by_rank
from pipedream.graph.profile import Quartiles

MEASURED = "measured.json"
"""File name in the folder of the run."""


class MeasuredRank(ArtifactModel):
    """Times of one rank in the steady state of the run, over `minibatches` and `updates`.

    `forward` and `backward`: seconds per minibatch, in the last stage with the loss; `backward`
    includes the second forward pass if the stage recomputes. `update`: one step of the optimizer.
    `all_reduce`: waiting for the sum of one round of gradients. `sending`, `waiting`: handing over
    and waiting for the messages of one minibatch. None if there were none.
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
        """Seconds of the passes and of a share of the update, per minibatch of the rank."""
        passes = self.forward.median + self.backward.median
        step = 0.0 if self.update is None else self.update.median
        return passes + step * self.updates / self.minibatches


class MeasuredRun(ArtifactModel):
    """The measured times of a run, with its plan.

    On a GPU, times are those of launching a pass, not of executing it. `threads`: CPU threads of
    one operator. `seconds_per_minibatch`: of the whole pipeline in the steady state. Paths in
    `plan` are relative to the folder of the run.
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
        measured = [(rank.rank, rank.stage, rank.replica) for rank in self.ranks]
        if sorted(measured) != sorted(workers):
            raise ValueError("the ranks are not those of the plan")
        return self

    def of_stage(self, stage: int) -> tuple[MeasuredRank, ...]:
        """The ranks of a stage."""
        return tuple(rank for rank in self.ranks if rank.stage == stage)

    @property
    def slowest(self) -> tuple[int, float]:
        """The stage with the most compute time per minibatch of the pipeline, and its seconds."""
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
