"""The plan: which nodes run on which ranks, and what that should cost. plan.json is its text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import reduce
from math import prod
from operator import add
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

from pydantic import Field, PositiveInt, model_validator

from pipedream.graph.choices import (
    DEFAULT_ORDER,
    WHOLE_ORDERS,
    Correction,
    Grouping,
    InFlight,
    IntraOp,
    OptimizerName,
    Recompute,
    ScheduleName,
    Zero,
)
from pipedream.graph.cluster import Cluster
from pipedream.graph.command import write_whole
from pipedream.graph.errors import ArtifactModel, UserError, read_artifact
from pipedream.graph.model import Graph
from pipedream.graph.placements.requests import PlacementTexts
from pipedream.graph.units import show_seconds

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_AS_EXPECTED = 0.05
"""Two runs of one plan differ by as much on a machine that is shared."""


class WorkerGroup(NamedTuple):
    """The ranks that together run one replica of a stage: `ranks[d]` is device d of its mesh. They
    all perform the same list of actions.
    """

    ranks: tuple[int, ...]

    @property
    def leader(self) -> int:
        """Returns the rank that speaks for the group."""
        return self.ranks[0]


RankAssignment: TypeAlias = Sequence[Sequence[WorkerGroup]]
"""`assignment[stage][replica]` is the group of ranks of that worker."""


def workers_by_rank(assignment: RankAssignment) -> dict[int, list[tuple[int, int]]]:
    """Returns the workers of each rank, as (stage, replica) in ascending order."""
    workers: dict[int, list[tuple[int, int]]] = {}
    for stage, groups in enumerate(assignment):
        for replica, group in enumerate(groups):
            for rank in group.ranks:
                workers.setdefault(rank, []).append((stage, replica))
    return workers


class PlannedNode(ArtifactModel):
    """A node of the graph the plan was made from, so that a difference can be named."""

    id: str
    description: str
    inputs: tuple[str, ...]
    """Ids of the nodes it reads from."""

    @property
    def is_input(self) -> bool:
        """Tells whether this is an input, like `Node.is_input`."""
        return self.description.startswith("Input")


class PlannedGraph(ArtifactModel):
    """The structure of the graph the plan was made from, in topological order."""

    fingerprint: str
    """`Graph.fingerprint`: a hash of the structure."""
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
    """Bytes on one worker at the moment when it holds most; they add up."""

    parameters: Amount
    """Of the newest version."""
    weight_versions: Amount
    """Older versions that minibatches in flight still use."""
    optimizer_state: Amount
    gradients: Amount
    """Of the parameters."""
    buckets: Amount = 0.0
    """In which replicas add their gradients up."""
    activations: Amount
    """What the nodes keep for the backward passes of the minibatches in flight."""
    recomputed: Amount = 0.0
    """What the forward pass that runs again makes for the backward pass of one minibatch."""
    inputs: Amount
    """What the stage has received, and what is on its way, input batches among it."""
    workspace: Amount
    """What the backward pass of one node needs in addition."""
    allocator: Amount = 0.0
    """Gaps between blocks, freed blocks that are kept, and memory of libraries, as measured."""

    @property
    def weights(self) -> float:
        """Returns the bytes that stay where they are from the first update on."""
        return self.parameters + self.weight_versions + self.optimizer_state + self.buckets

    @property
    def passing(self) -> float:
        """Returns the bytes that come and go with minibatches, to which the allocator adds."""
        activations = self.activations + self.recomputed
        return self.gradients + activations + self.inputs + self.workspace

    @property
    def tensors(self) -> float:
        """Returns the bytes of tensors alone."""
        return self.total - self.allocator

    @property
    def total(self) -> float:
        return reduce(add, self.model_dump().values(), 0.0)


class Stage(ArtifactModel):
    """A stage: its nodes, and the ranks that each hold a replica of it."""

    stage: int = Field(ge=0)
    """Its position in the pipeline, from 0."""
    nodes: tuple[str, ...] = Field(min_length=1)
    """In topological order."""
    ranks: tuple[int, ...] = Field(min_length=1)
    """Places in the cluster (`Cluster.rank`), replica by replica, and of each replica those of its
    mesh row by row; of r replicas number b % r runs minibatch b.
    """
    mesh: tuple[PositiveInt, ...] | None = None
    """The sizes of its axes, if the devices of a mesh share the operators of each replica."""
    placements: PlacementTexts | None = None
    """How they do: of these parameters and values; the rest follows (`sharding.propagate`)."""
    compute_seconds: Amount
    """Forward plus backward of a minibatch on the slowest worker, recomputation included."""
    parameter_bytes: Amount
    memory_bytes: Amount
    """The most that one worker needs, with `in_flight` minibatches."""
    memory: StageMemory | None = None
    """What `memory_bytes` is made of."""
    in_flight: int | None = Field(default=None, ge=1)
    """Minibatches between forward and backward on each worker."""
    recompute: bool | tuple[str, ...] = False
    """Whether the forward pass runs again before the backward pass, so that only what the stage has
    received is kept in between; or the nodes that run again in the course of the backward pass, and
    of which nothing is kept in between.
    """
    zero: bool = False
    """Whether the replicas divide the optimizer's state among them (ZeRO-1): each updates a part of
    the parameters, and receives the others.
    """
    offload: bool = False
    """Whether what the nodes keep for backward passes is moved to the memory of the host meanwhile.
    """
    offload_seconds: Amount | None = None
    """What that takes for a minibatch in each direction, beside the passes."""

    @property
    def by_node(self) -> bool:
        """Tells whether it is settled for each node what is kept for its backward pass."""
        return self.offload or bool(self.recomputed_nodes)

    @property
    def by_autograd(self) -> bool:
        """Tells whether its passes have to be those of autograd, neither compiled nor divided."""
        return self.by_node and self.mesh is None

    @property
    def recomputes_all(self) -> bool:
        return self.recompute is True

    @property
    def recomputed_nodes(self) -> tuple[str, ...]:
        """Returns the nodes that run again one by one, if not the whole stage does."""
        return () if isinstance(self.recompute, bool) else self.recompute

    @property
    def devices(self) -> int:
        """Returns the devices of one replica."""
        return prod(self.mesh or ())

    @property
    def replicas(self) -> int:
        return len(self.ranks) // self.devices

    @property
    def teams(self) -> tuple[WorkerGroup, ...]:
        """Returns the places of each replica in the cluster."""
        begins = range(0, len(self.ranks), self.devices)
        return tuple(WorkerGroup(self.ranks[at : at + self.devices]) for at in begins)

    @model_validator(mode="after")
    def _check_mesh(self) -> Stage:
        if len(self.ranks) % self.devices:
            raise ValueError(
                f"stage {self.stage} has {len(self.ranks)} ranks, which is no multiple of the "
                f"{self.devices} devices of its mesh {self.mesh}"
            )
        if self.placements is not None:
            if self.mesh is None:
                raise ValueError(f"stage {self.stage} has placements and no mesh")
            self.placements.requests(len(self.mesh))
        return self

    @model_validator(mode="after")
    def _check_recompute(self) -> Stage:
        for name in self.recomputed_nodes:
            if name not in self.nodes:
                raise ValueError(f"stage {self.stage} recomputes node {name}, not one of its own")
        if self.mesh is not None and self.offload:
            raise ValueError(f"stage {self.stage} is on a mesh, where offload is false")
        if self.offload and self.recompute:
            raise ValueError(f"stage {self.stage} has offload and recompute: choose one")
        return self


class Simulated(ArtifactModel):
    """The steady state of the plan's schedule, simulated action by action."""

    seconds_per_minibatch: Amount
    bubble: float = Field(ge=0, le=1)
    """Share of the workers' time that is neither computing nor updating."""


class StageSeconds(ArtifactModel):
    """What a worker of a stage does in the time of a minibatch of the pipeline, in the mean over
    its replicas. What is left of that time it does nothing that is known.
    """

    compute: Amount
    """Passes and updates."""
    waiting: Amount
    """For messages of other stages."""
    exchange: Amount
    """Sums over replicas and norms of all ranks, and handing messages over."""


class Predicted(ArtifactModel):
    """Holds what the cost model says of this plan, and of two that need no planner."""

    cost_model: str
    objective: Literal["throughput", "latency"] = "throughput"
    microbatches: int | None = Field(default=None, ge=1)
    """Minibatches per update, if the schedule makes one for several."""
    latency_seconds: Amount | None = None
    """With objective latency, the time of a batch: sum t_i + (microbatches - 1) max t_j."""
    latency_lower_bound_seconds: Amount | None = None
    """No plan takes less."""
    seconds_per_minibatch: Amount
    """Of the slowest stage."""
    expected_seconds_per_minibatch: Amount | None = None
    """Expected in a run, where workers wait for the slowest; None if the variation is unknown."""
    expected_interval: tuple[Amount, Amount] | None = None
    """Nine of ten runs take between these seconds."""
    expected_stages: tuple[StageSeconds, ...] | None = None
    """What the workers of each stage do then."""
    expected_deviation_seconds: Amount | None = None
    """Of older plans: how far runs differ from it, either way, as passes vary."""
    gain: Annotated[float, Field(gt=-1, allow_inf_nan=False)] | None = None
    """How much faster it is than the plan of the newest run that times were corrected by, relative
    and by the same times; 0 if it is that plan."""
    lower_bound_seconds: Amount
    """No plan takes less per minibatch."""
    one_worker_seconds: Amount
    """The whole model on one device."""
    data_parallel_seconds: Amount
    """The whole model replicated on all devices."""
    process_bytes: Amount | None = None
    """What each process holds beside the memory of its stages: Python, torch, the captured model;
    None if it was not measured."""
    simulated: Simulated | None = None

    @property
    def words_for_a_run(self) -> str:
        """Returns the seconds per minibatch of a run, and of nine of ten runs, as text."""
        text = show_seconds(self.seconds_in_a_run)
        if self.expected_interval is None:
            return text
        least, most = map(show_seconds, self.expected_interval)
        return f"{text} ({least} to {most} in nine of ten runs)"

    def expects(self, seconds: float) -> bool:
        """Tells whether a run that takes so many per minibatch is one of nine of ten; of older
        plans, that say nothing of it, whether it is within 5 %.
        """
        if self.expected_interval is not None:
            least, most = self.expected_interval
            return least <= seconds <= most
        return abs(seconds - self.seconds_in_a_run) <= _AS_EXPECTED * self.seconds_in_a_run

    @property
    def seconds_in_a_run(self) -> float:
        """Returns the expected seconds per minibatch; without variation if it is unknown."""
        expected = self.expected_seconds_per_minibatch
        return self.seconds_per_minibatch if expected is None else expected

    @property
    def seconds_shared_out(self) -> float:
        """Returns the seconds per minibatch; for latency, the batch time by its minibatches."""
        if self.latency_seconds is None or self.microbatches is None:
            return self.seconds_per_minibatch
        return self.latency_seconds / self.microbatches


BoundedAmount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
"""Of which a sum is finite."""


class LinkSeconds(ArtifactModel):
    """Holds the seconds that an activation, and its gradient, takes between two stages."""

    source: int = Field(ge=0)
    target: int = Field(ge=0)
    there: BoundedAmount
    back: BoundedAmount


class OrderTimes(ArtifactModel):
    """Holds what an order of passes is found for: seconds and bytes of a microbatch, by stage."""

    forward: tuple[BoundedAmount, ...]
    backward_input: tuple[BoundedAmount, ...]
    """Of the gradients of what the stage has received."""
    backward_weight: tuple[BoundedAmount, ...]
    """Of the gradients of its parameters."""
    links: tuple[LinkSeconds, ...] = ()
    held_bytes: tuple[BoundedAmount, ...]
    """Between forward and backward pass."""
    kept_bytes: tuple[BoundedAmount, ...]
    """Of those, between the two halves of the backward pass."""
    limit_bytes: Amount | None = None
    """The most that a rank may hold of them, of all its stages."""

    def check(self, stages: int) -> None:
        """Raises ValueError if they are not those of so many stages."""
        for name in ("forward", "backward_input", "backward_weight", "held_bytes", "kept_bytes"):
            count = len(getattr(self, name))
            if count != stages:
                raise ValueError(f"order_times: {name} has {count} numbers for {stages} stages")
        for stage, (held_bytes, kept_bytes) in enumerate(
            zip(self.held_bytes, self.kept_bytes, strict=True)
        ):
            if kept_bytes > held_bytes:
                raise ValueError(
                    f"order_times: stage {stage} keeps {kept_bytes} bytes of {held_bytes} held"
                )
        pairs = [(link.source, link.target) for link in self.links]
        for source, target in pairs:
            if not source < target < stages:
                raise ValueError(f"order_times: no link leads from stage {source} to {target}")
        if len(set(pairs)) < len(pairs):
            raise ValueError("order_times: a link is there twice")


class PlanningOptions(ArtifactModel):
    """Options of pd-optimize that shaped the plan and do not show in it, as they were typed.
    `pd-optimize --like PLAN` uses them again.
    """

    memory: str | None = None
    room: str | None = None
    recompute: Recompute = "auto"
    zero: Zero = "auto"
    host_bandwidth: str | None = None
    straight: bool = False
    fewer_machines: bool = False
    activation_compression: float | None = None
    epsilon: float | None = None
    layers: int | None = None
    update_rate: str | None = None
    in_flight: InFlight = "useful"
    mesh: str | None = None
    shard: tuple[str, ...] | None = None
    profile: str | None = None
    """Path of profile.json from the plan's folder."""
    intra_op: IntraOp = "auto"
    group: Grouping = "none"


class DraftPlan(ArtifactModel):
    """Holds what a plan does, whether or not it has been checked: planning makes many, and checks
    the one that it chooses (`Plan(**dict(draft))`).
    """

    format: Literal["pipedream-plan/1"] = "pipedream-plan/1"
    graph: PlannedGraph
    """The graph the plan was made from; pd-train refuses another one."""
    cluster: Cluster
    """The cluster it was made for."""
    schedule: ScheduleName = "weight-stashing"
    """When weights are updated, and which version a minibatch uses."""
    optimizer: OptimizerName | None = None
    """The optimizer whose state the memory of the stages includes."""
    corrections: tuple[Correction, ...] | None = None
    """The corrections for late gradients whose memory it includes."""
    batch_size: int | None = Field(default=None, ge=1)
    """Examples of the minibatch that times and memory are for, if the profile says so."""
    compile: str | None = None
    """torch.compile's backend that they are for; None if stages are not compiled."""
    eager_nodes: tuple[str, ...] | None = None
    """Nodes of groups that are not compiled, as that was not faster, if stages are by groups."""
    stages: tuple[Stage, ...] = Field(min_length=1)
    """In their order."""
    predicted: Predicted
    asked: PlanningOptions | None = None
    """The other options of pd-optimize."""
    order: str | None = None
    """The order of passes on a rank, by its name in `schedule.ORDERS`; by default 1f1b.
    With another order a rank may be in several stages.
    """
    order_times: OrderTimes | None = None
    """With order auto: the order is a function of these."""

    @model_validator(mode="before")
    @classmethod
    def _from_older(cls, fields: Any) -> Any:
        """Plans used to name one correction, as a field that was true."""
        if not isinstance(fields, dict) or "weight_prediction" not in fields:
            return fields
        others = {name: each for name, each in fields.items() if name != "weight_prediction"}
        return others | (
            {"corrections": ["weight_prediction"]} if fields["weight_prediction"] else {}
        )

    @property
    def workers(self) -> int:
        """Returns how many devices the plan uses, and processes a run has."""
        return len({rank for stage in self.stages for rank in stage.ranks})

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(stage.replicas for stage in self.stages)

    @property
    def max_in_flight(self) -> tuple[int, ...] | None:
        """Returns how many minibatches each stage may have in flight, if the planner says so."""
        counts = [stage.in_flight for stage in self.stages if stage.in_flight is not None]
        return tuple(counts) if len(counts) == len(self.stages) else None

    @property
    def rank_assignment(self) -> tuple[tuple[WorkerGroup, ...], ...]:
        """Returns the process ranks of each worker of each stage.

        A plan may leave devices unused; the processes of a run are numbered 0..workers-1 all the
        same, in the order of the devices.
        """
        used = sorted({rank for stage in self.stages for rank in stage.ranks})
        process = {rank: index for index, rank in enumerate(used)}
        return tuple(
            tuple(WorkerGroup(tuple(process[rank] for rank in team.ranks)) for team in stage.teams)
            for stage in self.stages
        )

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """Returns the pairs of stages of which the second reads what the first computes, in order.
        Inputs of the model are read by each stage itself.
        """
        stage_of = self.stage_of
        inputs = {node.id for node in self.graph.nodes if node.is_input}
        pairs = {
            (stage_of[source], stage_of[node.id])
            for node in self.graph.nodes
            for source in node.inputs
            if source not in inputs
        }
        return tuple(sorted(pair for pair in pairs if pair[0] != pair[1]))

    @property
    def rank_map(self) -> tuple[int, ...]:
        """Returns the place of each stage in the pipeline; stages of the same ranks share one."""
        places: dict[tuple[int, ...], int] = {}
        return tuple(places.setdefault(stage.ranks, len(places)) for stage in self.stages)

    @property
    def stage_of(self) -> dict[str, int]:
        """Returns the stage of each node."""
        return {node: stage.stage for stage in self.stages for node in stage.nodes}


PlanT = TypeVar("PlanT", bound=DraftPlan)


class Plan(DraftPlan):
    """Holds everything that pd-train needs to know of a plan. It has been checked: each node is in
    one stage, none reads from a later one, and each rank is in the cluster.
    """

    @model_validator(mode="after")
    def _check(self) -> Plan:
        for position, stage in enumerate(self.stages):
            if stage.stage != position:
                raise ValueError(f"stage {stage.stage} stands at position {position}")
        if self.stages[-1].recomputes_all:
            raise ValueError("the last stage has recompute: its backward pass follows at once")
        self._check_nodes()
        self._check_ranks()
        if self.order not in (None, *WHOLE_ORDERS):
            for stage in self.stages:
                if stage.by_node:
                    raise ValueError(
                        f"stage {stage.stage} recomputes single nodes, or has offload: order"
                        f" {self.order} divides backward passes, where recompute is true or false"
                    )
        if self.order_times is not None:
            self.order_times.check(len(self.stages))
        return self

    def _check_ranks(self) -> None:
        stage_of: dict[int, int] = {}
        for stage in self.stages:
            for rank in stage.ranks:
                if not 0 <= rank < self.cluster.devices:
                    raise ValueError(f"rank {rank}: the cluster has {self.cluster.devices} devices")
                if stage_of.get(rank) == stage.stage:
                    raise ValueError(f"stage {stage.stage} names rank {rank} twice")
                if rank in stage_of and self.order in (None, DEFAULT_ORDER):
                    raise ValueError(
                        f"rank {rank} is in stages {stage_of[rank]} and {stage.stage}: order "
                        f"{DEFAULT_ORDER} runs one stage on each rank"
                    )
                stage_of[rank] = stage.stage
        self._check_teams()

    def _check_teams(self) -> None:
        """All ranks of a team perform the same list of actions."""
        workers = workers_by_rank([stage.teams for stage in self.stages])
        for stage in self.stages:
            for team in stage.teams:
                if len({tuple(workers[rank]) for rank in team.ranks}) > 1:
                    raise ValueError(
                        f"stage {stage.stage}: ranks {', '.join(map(str, team.ranks))} share a"
                        " replica, and not all of them are in the same other stages"
                    )

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


def read_plan(path: Path) -> Plan:
    """Reads plan.json. Raises UserError `FILE: where: what is wrong`."""
    if path.is_dir() and (path / "plan.json").is_file():
        raise UserError(f"{path}: is a folder; did you mean {path / 'plan.json'}?")
    return read_artifact(path, Plan)


def moved(plan: Plan, source: Path, target: Path) -> Plan:
    """Returns the plan in the folder `source` for a file in `target`: the profile's path moves."""
    if plan.asked is None or plan.asked.profile is None:
        return plan
    way = os.path.relpath((source / plan.asked.profile).resolve(), target.resolve())
    return plan.model_copy(update={"asked": plan.asked.model_copy(update={"profile": way})})


def write_plan(plan: Plan, path: Path) -> None:
    write_whole(path, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """The text of plan.json."""
    return plan.model_dump_json(indent=1, exclude_none=True) + "\n"
