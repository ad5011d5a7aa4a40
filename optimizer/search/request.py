"""The planning request: everything that a plan depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from pipedream.graph.choices import (
    MICROBATCHES,
    Correction,
    InFlight,
    OptimizerName,
    Recompute,
    ScheduleName,
    Zero,
)
from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.plan import DraftPlan, PlannedGraph
from pipedream.graph.profile import (
    Footprint,
    ProfiledProcess,
    Sharing,
    TrainingOverheads,
    Uncertainty,
)
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.memory import READ_AHEAD, MemoryModel, TrainingSettings
from pipedream.optimizer.cost.models import CostModel
from pipedream.optimizer.cost.stage_cost import MemoryLimit, Replication
from pipedream.optimizer.cost.stages import Rules, StageOnDevices
from pipedream.optimizer.cost.worker_memory import WorkerMemory, worker_memory
from pipedream.optimizer.cuts.downsets import Cuts
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.split import Split
from pipedream.optimizer.simulate.closed_form import ClosedForm
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.optimizer.simulate.simulator import QUICK_MOVES, Noise, simulate_plan
from pipedream.optimizer.simulate.workload import UPDATE_RATE, Workload
from pipedream.schedule.policy import Policy, uniform_updates, updates_in_place


class GraphViews:
    """Graphs as plans hold them and as searches divide them, each made when it is first needed, for
    all requests that are made of one another.

    Graphs and footprints are told apart by identity: they never change, and may be large.
    """

    def __init__(self) -> None:
        self._planned: list[tuple[Graph, PlannedGraph]] = []
        self._planning: list[PlanningGraph] = []

    @staticmethod
    def of(planned: PlannedGraph, planning: PlanningGraph) -> GraphViews:
        """Those of one graph, known already."""
        views = GraphViews()
        views._planned.append((planning.graph, planned))
        views._planning.append(planning)
        return views

    def planned(self, graph: Graph) -> PlannedGraph:
        """What a plan says of the graph."""
        for known, planned in self._planned:
            if known is graph:
                return planned
        self._planned.append((graph, PlannedGraph.of(graph)))
        return self._planned[-1][1]

    def planning(
        self,
        graph: Graph,
        footprints: Mapping[str, Footprint] | None,
        overheads: tuple[float, float, float, float],
        sharing: tuple[Sharing, ...],
        groups: tuple[tuple[str, ...], ...] = (),
    ) -> PlanningGraph:
        """The graph to divide; `overheads`: its seconds of update, call, reading and summing."""
        for known in self._planning:
            alike = known.graph is graph and known.footprints is footprints
            seconds = known.update, known.call, known.reading, known.summing
            whole = known.sharing == sharing and known.groups == groups
            if alike and seconds == overheads and whole:
                return known
        update, call, reading, summing = overheads
        self._planning.append(
            PlanningGraph.of(graph, footprints, update, call, reading, sharing, groups, summing)
        )
        return self._planning[-1]


_MANY_DEVICES = 128


@dataclass(frozen=True)
class Request:
    """What to plan.

    - `memory`: bytes usable on each device, None for no limit;
    - `latency`: the batch to finish soonest, None to plan for throughput;
    - `microbatches`: of one update, for schedules that make one per several minibatches; None for
      the batch of `latency`, or else the default;
    - `selective`: with `recompute` auto, single nodes of a stage may run again; and its
      activations be moved to the host, with `host_bandwidth` bytes per second each way;
    - `footprints`: memory of the graph's nodes; without them each node keeps its outputs;
    - `in_flight`: as few minibatches as fill the pipeline, or as many as keep its pace and fit;
    - `zero`: whether the replicas of a stage divide the optimizer's state;
    - `update_rate`: bytes of parameters that the optimizer updates per second, with a copy of the
      older version; `in_place_rate`: without one, None for the same;
    - `overheads`: measured costs of training besides its nodes, where the profile has them;
    - `order`: of the passes on a rank, and `stages_each`: stages of a rank, None for the best;
    - `sharing`: parameters that several nodes read, and learn together;
    - `split`: the stages, if they are given and only to be priced;
    - `room`: how many bytes of a device are not the model's;
    - `process`: what a process holds beside its tensors, if that was measured;
    - `groups`: of nodes, that no plan cuts;
    - `hurried`: teams of many devices, which are searched as quickly as these;
    - `programs`: stages run as programs, as on meshes;
    - `devices`: of the workers of each stage, or of all stages if that is one number; none for one;
    - `views`: what has been worked out of graphs, which requests made by `replace` share.
    """

    graph: Graph
    cluster: Cluster
    model: CostModel
    schedule: ScheduleName = "weight-stashing"
    memory: float | None = None
    rules: Rules = field(default_factory=Rules)
    latency: Latency | None = None
    optimizer: OptimizerName = "sgd"
    recompute: Recompute = "auto"
    zero: Zero = "never"
    selective: bool = False
    host_bandwidth: float | None = None
    footprints: Mapping[str, Footprint] | None = None
    microbatches: int | None = None
    corrections: frozenset[Correction] = frozenset()
    in_flight: InFlight = "useful"
    update_rate: float = UPDATE_RATE
    in_place_rate: float | None = None
    overheads: TrainingOverheads | None = None
    order: str | None = None
    stages_each: int | None = None
    sharing: tuple[Sharing, ...] = ()
    split: Split | None = None
    room: float = 0.0
    process: ProfiledProcess | None = None
    groups: tuple[tuple[str, ...], ...] = ()
    hurried: bool = False
    programs: bool = False
    devices: tuple[int, ...] = ()
    views: GraphViews = field(default_factory=GraphViews, repr=False, compare=False)

    def priced_as(self, graph: Graph, footprints: Mapping[str, Footprint] | None) -> Request:
        """The same with the figures of a graph of the same structure."""
        views = GraphViews.of(
            self.views.planned(self.graph), self.planning.priced_as(graph, footprints)
        )
        return replace(self, graph=graph, footprints=footprints, views=views)

    @property
    def has_many_devices(self) -> bool:
        """Whether searches and simulations take so long that what only refines a choice is left
        out: the all-reduce in the bound, plans on fewer devices and by the cost models of others,
        better ones of other schedules, and steps from any plan but the best.
        """
        return self.hurried or self.cluster.devices > _MANY_DEVICES

    @property
    def cost_model(self) -> CostModel:
        """The model under the schedule."""
        settings = self.settings
        in_rounds = uniform_updates(settings.schedule)
        return self.model.in_rounds(settings.microbatches if in_rounds else None)

    @cached_property
    def planning(self) -> PlanningGraph:
        """The graph to divide, with the overheads that the cost model counts."""
        seconds = self._overhead_seconds
        return self.views.planning(self.graph, self.footprints, seconds, self.sharing, self.groups)

    @property
    def step_rate(self) -> float:
        """Bytes of parameters per second of a step, as the schedule makes it."""
        if self.in_place_rate is not None and updates_in_place(self.schedule):
            return self.in_place_rate
        return self.update_rate

    @property
    def _overhead_seconds(self) -> tuple[float, float, float, float]:
        """Those of a PlanningGraph: update, call, reading, summing."""
        overheads = self._counted_overheads
        if overheads is None:
            return 0.0, 0.0, 0.0, 0.0
        settings = self.settings
        per_update = settings.microbatches if uniform_updates(settings.schedule) else 1
        calls = overheads.call_forward + overheads.call_backward
        update, summing = 1 / self.step_rate / per_update, overheads.sum_seconds(per_update)
        return update, calls, overheads.reading, summing

    @property
    def spread(self) -> Sequence[float]:
        """How much passes vary from one to the next, as multiples of their median; empty if not
        counted.
        """
        overheads = self._counted_overheads
        return () if overheads is None else overheads.spread

    @property
    def own_drift(self) -> float:
        """How much each worker's passes drift by themselves, as `PassVariation.own`."""
        overheads = self._counted_overheads
        return 0.0 if overheads is None else overheads.own_drift

    @property
    def spread_in_all(self) -> Sequence[float]:
        """As `spread`, with the drift."""
        overheads = self._counted_overheads
        return () if overheads is None else overheads.in_all

    def devices_of(self, stages: int) -> tuple[int, ...]:
        """How many devices a worker of each of the stages is."""
        return self.devices if len(self.devices) == stages else (self.devices or (1,)) * stages

    def all_devices(self, replicas: Sequence[int]) -> list[int]:
        """How many devices stages with so many workers have."""
        pairs = zip(replicas, self.devices_of(len(replicas)), strict=True)
        return [workers * devices for workers, devices in pairs]

    @property
    def uncertainty(self) -> Uncertainty:
        """Of the times of the graph's nodes."""
        return Uncertainty() if self.overheads is None else self.overheads.uncertainty

    @property
    def _counted_overheads(self) -> TrainingOverheads | None:
        return self.overheads if self.model.counts_overheads else None

    @cached_property
    def _gaps(self) -> dict[str, tuple[float, float]]:
        return {} if self.process is None else self.process.of_nodes(self.graph.order)

    @property
    def settings(self) -> TrainingSettings:
        batch = self.latency and self.latency.microbatches
        microbatches = self.microbatches or batch or MICROBATCHES
        settings = TrainingSettings(
            *(self.schedule, self.optimizer, microbatches, self.corrections),
            programs=self.programs,
        )
        if self.process is None:
            return settings
        return replace(settings, gaps=self._gaps, read_ahead=READ_AHEAD)

    @property
    def device_types(self) -> DeviceTypes:
        """The types of device, with the bytes that may be used of each."""
        return DeviceTypes.of(self.cluster, self.memory, self.room)

    def allows(self, downset: int) -> bool:
        """Whether a stage may end there: not between nodes that share a parameter, if each stage
        would learn its own.
        """
        return uniform_updates(self.schedule) or self.planning.keeps_together(downset)

    def check_shared(self, ends: Sequence[int], replicas: Sequence[int]) -> None:
        """Raises UserError if stages that end before these nodes share parameters that they cannot
        learn together, as pd-train would.
        """
        policy = self.settings.policy(replicas)
        ranks = [[stage] for stage in range(len(ends))]
        for shared, (_, nodes) in zip(self.sharing, self.planning.shared, strict=True):
            stages = sorted({sum(end <= node for end in ends) for node in nodes})
            problem = policy.unshared(shared.parameter, stages, ranks)
            if len(stages) > 1 and problem is not None:
                raise UserError(problem)

    def allowed_cuts(self, downsets: Sequence[int]) -> Cuts:
        """Those of the downsets at which a stage may end."""
        return Cuts(self.planning, [downset for downset in downsets if self.allows(downset)])

    @property
    def room_for(self) -> str:
        """Says whose `room` is."""
        return "CUDA and NCCL" if self.process is None else "Python and torch"

    @property
    def left_for_model(self) -> float | None:
        """Bytes of `memory` that are the model's; None for no limit."""
        return None if self.memory is None else max(0.0, self.memory - self.room)

    def memory_model(self, cuts: Cuts) -> MemoryModel:
        return MemoryModel(cuts, self.settings)

    def constrains_stages(self, device_types: DeviceTypes) -> bool:
        """Whether memory, recomputation or a divided state restricts or changes stages."""
        return device_types.memory_limited or "always" in (self.recompute, self.zero)

    def limit(self, memory: MemoryModel, device_types: DeviceTypes) -> MemoryLimit | None:
        """The memory limit of a stage, None where neither that nor recomputation nor a divided
        state matters. On devices without a limit none is chosen to save memory.
        """
        if not self.constrains_stages(device_types):
            return None
        auto_is_never = not device_types.memory_limited
        return MemoryLimit(
            device_types.smallest_memory,
            memory,
            "never" if auto_is_never and self.recompute != "always" else self.recompute,
            "never" if auto_is_never and self.zero == "auto" else self.zero,
            self.selective,
            self.host_bandwidth,
        )

    def workers(self, memory: MemoryModel, stages: Sequence[StageOnDevices]) -> list[WorkerMemory]:
        """The memory of each stage's workers, as `worker_memory`."""
        types = self.device_types
        return worker_memory(memory, self.limit(memory, types), stages, types)

    def stage_cost(
        self, cuts: Cuts, limit: MemoryLimit | None = None, working: bool = False
    ) -> Replication:
        """What a stage between the cuts costs on some devices; `working`: without any work it is
        not allowed.
        """
        return Replication(cuts, self.cluster, self.cost_model, limit, working)

    def policy(self, plan: DraftPlan) -> Policy:
        """That of the plan's stages, with as many minibatches in flight as the plan has."""
        return self.settings.policy(plan.replicas, plan.max_in_flight)

    def workload(self, plan: DraftPlan, policy: Policy) -> Workload:
        return Workload.of(plan, policy, self.graph, self.step_rate, self.overheads)

    def simulate(
        self,
        plan: DraftPlan,
        most_moves: int = QUICK_MOVES,
        noise: Noise | None = None,
        rough: bool = False,
    ) -> Simulation | None:
        """As `simulate_plan`, with the times of this request."""
        given = plan, self.graph, self.step_rate, self.overheads
        return simulate_plan(*given, most_moves, noise, rough)

    def closed_form(self, plan: DraftPlan, policy: Policy) -> ClosedForm:
        ranks = [stage.ranks for stage in plan.stages]
        return ClosedForm(self.workload(plan, policy), plan.cluster, ranks, policy)
