"""The plan: which nodes run on which ranks, and what that should cost. plan.json is its text."""

from __future__ import annotations

import os
from functools import reduce
from operator import add
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipedream.graph.choices import InFlight, OptimizerName, Recompute, ScheduleName
from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import ArtifactModel, read_artifact
from pipedream.graph.model import Graph

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PlannedNode(ArtifactModel):
    """A node of the graph the plan was made from, so that a difference can be named."""

    id: str
    description: str
    inputs: tuple[str, ...]


class PlannedGraph(ArtifactModel):
    """The structure of the graph the plan was made from, in topological order."""

    fingerprint: str
    nodes: tuple[PlannedNode, ...]

    @model_validator(mode="after")
    def _check(self) -> PlannedGraph:
        seen: set[str] = set()
        for node in self.nodes:
            if node.id in seen:
                raise ValueError(f"node {node.id} is there twice")
            for source in node.inputs:
                if source not in seen:
                    raise ValueError(f"{source} feeds {node.id} but does not come before it")
            seen.add(node.id)
        return self

    @staticmethod
    def of(graph: Graph) -> PlannedGraph:
        nodes = tuple(
            PlannedNode(
                id=name,
                description=graph.nodes[name].description,
                inputs=graph.predecessors[name],
            )
            for name in graph.order
        )
        return PlannedGraph(fingerprint=graph.fingerprint, nodes=nodes)


class StageMemory(ArtifactModel):
    """Bytes on one worker at the moment when it holds most; they add up.

    `parameters`: the newest version; `weight_versions`: the older ones that minibatches in flight
    still use; `optimizer_state`; `gradients`: of the parameters; `activations`: what the nodes keep
    for the backward passes of the minibatches in flight; `inputs`: what the stage has received and
    what is on its way, input batches among them; `workspace`: what the backward pass of one node
    needs beside that.
    """

    parameters: Amount
    weight_versions: Amount
    optimizer_state: Amount
    gradients: Amount
    activations: Amount
    inputs: Amount
    workspace: Amount

    @property
    def total(self) -> float:
        return reduce(add, self.model_dump().values(), 0.0)


class Stage(ArtifactModel):
    """A stage: its nodes in topological order and the ranks that each hold a replica of it.

    `compute_seconds` is forward plus backward of one minibatch on one worker, the slowest; with
    `recompute` the forward pass is done once more before the backward pass, which that time
    includes, and only what the stage has received is kept in between. `memory_bytes` is what one
    worker needs at most, and `memory` what it is made of, where the planner has said so; both with
    `in_flight` minibatches between forward and backward on each worker.
    Ranks are places in the cluster (`Cluster.rank`), in no particular order: minibatch b runs on
    `ranks[b % len(ranks)]`.
    """

    stage: int = Field(ge=0)
    nodes: tuple[str, ...] = Field(min_length=1)
    ranks: tuple[int, ...] = Field(min_length=1)
    compute_seconds: Amount
    parameter_bytes: Amount
    memory_bytes: Amount
    memory: StageMemory | None = None
    in_flight: int | None = Field(default=None, ge=1)
    recompute: bool = False

    @property
    def replicas(self) -> int:
        return len(self.ranks)


class Simulated(ArtifactModel):
    """How the plan's schedule went when it was simulated, action by action.

    In the steady state; `bubble` is the share of the workers' time that is neither computing nor
    updating.
    """

    seconds_per_minibatch: Amount
    bubble: float = Field(ge=0, le=1)


class Predicted(ArtifactModel):
    """What the cost model predicts for this plan and for the two that need no planner.

    `seconds_per_minibatch` is the slowest stage's, `expected_seconds_per_minibatch` what it comes
    to in a run, where the profile says how much passes vary: workers wait for the slowest.
    `microbatches` make one update where the schedule makes one for several minibatches; where
    `objective` is latency, a batch of them takes `latency_seconds`:
    sum t_i + (microbatches - 1) max t_j. `simulated` where the plan has been.
    """

    cost_model: str
    objective: Literal["throughput", "latency"] = "throughput"
    microbatches: int | None = Field(default=None, ge=1)
    latency_seconds: Amount | None = None
    latency_lower_bound_seconds: Amount | None = None
    seconds_per_minibatch: Amount
    expected_seconds_per_minibatch: Amount | None = None
    lower_bound_seconds: Amount
    one_worker_seconds: Amount
    data_parallel_seconds: Amount
    simulated: Simulated | None = None

    @property
    def seconds_shared_out(self) -> float:
        """Per minibatch: of a batch's time its part, where that is what the plan is for."""
        if self.latency_seconds is None or self.microbatches is None:
            return self.seconds_per_minibatch
        return self.latency_seconds / self.microbatches


class PlanningOptions(ArtifactModel):
    """Options of pd-optimize that shaped the plan and do not show in it, as they were typed: what
    `pd-optimize --like PLAN` asks for again. `profile`: the way to it from the plan's folder.
    """

    memory: str | None = None
    recompute: Recompute = "auto"
    straight: bool = False
    fewer_machines: bool = False
    activation_compression: float | None = None
    epsilon: float | None = None
    layers: int | None = None
    update_rate: str | None = None
    in_flight: InFlight = "useful"
    profile: str | None = None


class Plan(ArtifactModel):
    """Everything pd-train needs to know of a plan; `pipedream-plan/1`.

    `optimizer` is the one whose state the memory of the stages counts, `weight_prediction` whether
    it counts predicted weights. `batch_size`: examples of the minibatch that times and memory are
    of, where the profile says so. `asked`: what else pd-optimize was asked for.
    """

    format: Literal["pipedream-plan/1"] = "pipedream-plan/1"
    graph: PlannedGraph
    cluster: Cluster
    schedule: ScheduleName = "weight-stashing"
    optimizer: OptimizerName | None = None
    weight_prediction: bool | None = None
    batch_size: int | None = Field(default=None, ge=1)
    stages: tuple[Stage, ...] = Field(min_length=1)
    predicted: Predicted
    asked: PlanningOptions | None = None

    @model_validator(mode="after")
    def _check(self) -> Plan:
        for position, stage in enumerate(self.stages):
            if stage.stage != position:
                raise ValueError(f"stage {stage.stage} stands at position {position}")
        if self.stages[-1].recompute:
            raise ValueError("the last stage has recompute: its backward pass follows at once")
        self._check_nodes()
        self._check_ranks()
        return self

    def _check_ranks(self) -> None:
        stage_of: dict[int, int] = {}
        for stage in self.stages:
            for rank in stage.ranks:
                if not 0 <= rank < self.cluster.devices:
                    raise ValueError(f"rank {rank}: the cluster has {self.cluster.devices} devices")
                if stage_of.get(rank) == stage.stage:
                    raise ValueError(f"stage {stage.stage} names rank {rank} twice")
                if rank in stage_of:
                    raise ValueError(
                        f"rank {rank} is in stages {stage_of[rank]} and {stage.stage}: schedule "
                        f"{self.schedule} runs one stage on each rank"
                    )
                stage_of[rank] = stage.stage

    def _check_nodes(self) -> None:
        known = {node.id for node in self.graph.nodes}
        stage_of: dict[str, int] = {}
        for stage in self.stages:
            for name in stage.nodes:
                if name not in known:
                    raise ValueError(f"stage {stage.stage} names node {name}, not in the graph")
                if name in stage_of:
                    raise ValueError(f"node {name} is in stages {stage_of[name]} and {stage.stage}")
                stage_of[name] = stage.stage
        for node in self.graph.nodes:
            if node.id not in stage_of:
                raise ValueError(f"node {node.id} is in no stage")
            for source in node.inputs:
                if stage_of.get(source, stage_of[node.id]) > stage_of[node.id]:
                    raise ValueError(f"{source} feeds {node.id} but is in a later stage")

    @property
    def workers(self) -> int:
        return sum(stage.replicas for stage in self.stages)

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(stage.replicas for stage in self.stages)

    @property
    def max_in_flight(self) -> tuple[int, ...] | None:
        """How many minibatches each stage may have in flight, where the planner has said so."""
        found = [stage.in_flight for stage in self.stages if stage.in_flight is not None]
        return tuple(found) if len(found) == len(self.stages) else None

    @property
    def process_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage, counting only the devices that the plan uses.

        A plan may leave devices unused; the processes of a run are numbered 0..workers-1 all the
        same, in the order of the devices.
        """
        used = sorted(rank for stage in self.stages for rank in stage.ranks)
        process = {rank: index for index, rank in enumerate(used)}
        return tuple(tuple(process[rank] for rank in stage.ranks) for stage in self.stages)

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of each node."""
        return {node: stage.stage for stage in self.stages for node in stage.nodes}


def read_plan(path: Path) -> Plan:
    """Reads plan.json. Raises UserError `FILE: where: what is wrong`."""
    return read_artifact(path, Plan)


def moved(plan: Plan, source: Path, target: Path) -> Plan:
    """What the plan in the folder `source` says, for a file in the folder `target`: from there it
    is another way to the profile.
    """
    if plan.asked is None or plan.asked.profile is None:
        return plan
    way = os.path.relpath((source / plan.asked.profile).resolve(), target.resolve())
    return plan.model_copy(update={"asked": plan.asked.model_copy(update={"profile": way})})


def write_plan(plan: Plan, path: Path) -> None:
    path.write_text(plan.model_dump_json(indent=1, exclude_none=True) + "\n", encoding="utf-8")
