"""Turns the options of `pd-optimize` into a task, and checks them before planning starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipedream.graph.choices import IntraOp
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.placements.operators import OperatorProfile
from pipedream.graph.placements.placement import Mesh
from pipedream.graph.profile import Profile, TrainingOverheads
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.cli.asked.corrections import corrections_of
from pipedream.optimizer.cli.asked.files import check_files
from pipedream.optimizer.cli.asked.memory import (
    check_room,
    host_bandwidth_of,
    process_of,
    room_of,
    zero_of,
)
from pipedream.optimizer.cli.asked.model import footprints_of, overheads_of, read_model
from pipedream.optimizer.cli.asked.operators import operators_asked, parse_mesh
from pipedream.optimizer.cli.asked.stages import groups_of, split_asked
from pipedream.optimizer.cli.asked.updates import in_rounds, latency_of, schedule_of, with_schedule
from pipedream.optimizer.cli.calibration import Calibration
from pipedream.optimizer.cli.cluster_options import bytes_of, cluster_of
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.compare.comparison import with_whole_model
from pipedream.optimizer.compare.sweep import check_sweep, parse_range
from pipedream.optimizer.cost.models import COST_MODELS, DEFAULT_COST_MODEL, CostModel
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.sharding.accounting import accounting, kept_bytes
from pipedream.optimizer.sharding.boundaries import Boundaries
from pipedream.optimizer.sharding.model_sharding import ModelSharding
from pipedream.optimizer.sharding.table import notes
from pipedream.optimizer.sharding.team_graph import (
    DividedStage,
    expand,
    of_leaders,
)
from pipedream.optimizer.sharding.views import Views, of_teams
from pipedream.optimizer.simulate.workload import MUON_UPDATE_RATE, UPDATE_RATE


@dataclass(frozen=True)
class Task:
    """What the options ask for.

    `numbers`: of workers to sweep over; `profile`: of the graph, if there is one; `calibration`:
    by which the graph has its times; `profiled`: the graph before that, and its `batch_size`,
    None if no profile says it; `any_schedule`: whether the user leaves it open; `operators`: of
    the graph, where they can be divided; `sharding`: of them on the mesh that each worker is; then
    the graph, the footprints and the cluster of the request are those of a team, and `undivided` is
    the request for workers of one device. `views`, `division`: of a plan whose stages have meshes
    of their own; the figures of the request are those of the division's stages.
    """

    request: Request
    numbers: range | None
    profile: Profile | None
    calibration: Calibration
    profiled: Graph
    batch_size: int | None
    any_schedule: bool = False
    sharding: ModelSharding | None = None
    operators: OperatorProfile | None = None
    undivided: Request | None = None
    views: Views | None = None
    division: Division | None = None

    @property
    def measured_for(self) -> Mapping[str, object]:
        """The fields of a plan that say what its times are those of."""
        size = {"batch_size": self.batch_size}
        if self.profile is None:
            return size
        return {
            **size,
            "compile": self.profile.compile,
            "eager_nodes": self.profile.eager_nodes or None,
        }

    @property
    def of_devices(self) -> Request:
        """The request for workers of one device, under the schedule that was chosen."""
        whole = self.undivided or self.request
        return replace(whole, schedule=self.request.schedule)

    @property
    def on_operators(self) -> Task:
        """The same with workers of one device, and stages that may end after any operator."""
        return self.on_devices(replace(self.of_devices, groups=()))

    def on_devices(self, request: Request | None = None) -> Task:
        """The same with workers of one device, for another request if it is given."""
        return replace(
            self,
            request=request or self.of_devices,
            sharding=None,
            undivided=None,
            views=None,
            division=None,
        )

    def on_mesh(self, mesh: Mesh, shards: Sequence[str], method: IntraOp) -> Task:
        """The same with workers that are meshes of devices. Raises UserError."""
        assert self.operators is not None
        assert self.profile is not None
        request = self.request
        footprints = request.footprints
        kept = {} if footprints is None else kept_bytes(self.operators, footprints)
        sharding = ModelSharding.of(
            *(mesh, shards, self.operators, request.cluster, method),
            *(accounting(request, mesh), kept),
        )
        teams = of_teams(request, self.profile, sharding)
        return replace(self, request=teams, sharding=sharding, undivided=request)

    def expanded(self, outcome: Outcome) -> Outcome:
        """With the devices of its teams, and what the whole model takes on one device, if it is for
        teams.
        """
        if self.profile is None or not self.shardings:
            return outcome
        plan = outcome.plan
        if self.views is not None and self.division is not None:
            divided = self.views.divided(self.division)
        else:
            assert self.sharding is not None
            taken = Boundaries.of([self.sharding]).taken(plan.stage_of, [0] * len(plan.stages))
            divided = [DividedStage(self.sharding, own) for own in taken]
            plan = of_leaders(plan, self.sharding)
        found = replace(outcome, plan=expand(plan, divided, self.profile))
        return found if self.request.hurried else with_whole_model(found, self.of_devices)

    @property
    def shardings(self) -> tuple[ModelSharding, ...]:
        """What divides stages, each once."""
        if self.views is None or self.division is None:
            return () if self.sharding is None else (self.sharding,)
        own = (self.views.views[mesh].sharding for mesh in sorted(set(self.division.meshes)))
        return tuple(each for each in own if each is not None)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the whole parameters and buffers, where operators are known."""
        inputs = () if self.operators is None else self.operators.graph.inputs
        return {e.name: e.type.shape for e in inputs if e.role in ("parameter", "buffer")}

    @property
    def placement_notes(self) -> Mapping[str, str]:
        """By node how its parameters are divided."""
        if self.profile is None:
            return {}
        if self.views is None or self.division is None:
            return {} if self.sharding is None else notes(self.sharding, self.profile)
        found: dict[str, str] = {}
        stage_of = self.views.stage_of(self.division)
        for stage, mesh in enumerate(self.division.meshes):
            sharding = self.views.views[mesh].sharding
            if sharding is not None:
                own = notes(sharding, self.profile).items()
                found |= {name: text for name, text in own if stage_of[name] == stage}
        return found


def make_task(options: Options) -> Task:
    """Reads the inputs. Raises UserError for everything that can be wrong before planning."""
    options = with_schedule(options)
    cluster = cluster_of(options)
    memory = None if options.memory is None else bytes_of("--memory", options.memory)
    latency, rounds = latency_of(options), in_rounds(options)
    numbers = None if options.sweep is None else parse_range(options.sweep)
    if numbers is not None:
        check_sweep(cluster, numbers)
    check_files(options)
    profiled, profile, runs = read_model(options)
    overheads = overheads_of(options, profiled, profile)
    schedule, cost_model = schedule_of(options, latency), _cost_model(options)
    operators = operators_asked(options, profiled, profile)
    update_rate, in_place_rate = _update_rates(options, overheads)
    request = Request(
        graph=profiled,
        cluster=cluster,
        model=cost_model,
        schedule=schedule,
        memory=memory,
        room=room_of(options, profile, cluster),
        process=process_of(profile, cluster),
        rules=Rules(options.straight, options.fewer_machines),
        latency=latency,
        optimizer=options.optimizer,
        recompute=options.recompute,
        zero=zero_of(options),
        host_bandwidth=host_bandwidth_of(options, profile),
        selective=profile is None or profile.compile is None,  # what is compiled runs as a whole
        in_flight=options.in_flight,
        update_rate=update_rate,
        in_place_rate=in_place_rate,
        overheads=overheads,
        footprints=footprints_of(options, profile),
        microbatches=options.microbatches if rounds else None,
        corrections=corrections_of(options, schedule, profile),
        order=options.order,
        stages_each=options.stages_per_rank,
        sharing=() if profile is None else profile.learned_together,
        split=split_asked(options, profiled, profile),
        groups=groups_of(options, profiled, operators, profile),
    )
    calibration = Calibration.of(runs, request, options, profile)
    request = calibration.corrected(request)
    check_room(request)
    any_schedule = options.schedule is None and latency is None and not options.corrections
    batch_size = None if profile is None else profile.batch_size
    task = Task(
        *(request, numbers, profile, calibration, profiled, batch_size, any_schedule),
        operators=operators,
    )
    if options.mesh is None:
        return task
    return task.on_mesh(parse_mesh(options.mesh), options.shard, options.intra_op)


def _update_rates(
    options: Options, overheads: TrainingOverheads | None
) -> tuple[float, float | None]:
    """As `update_rate` and `in_place_rate` of a request: what is said, or measured, or usual."""
    if options.update_rate is not None:
        return bytes_of("--update-rate", options.update_rate), None
    name = options.optimizer
    if overheads is not None and name in overheads.update_rates:
        return overheads.update_rates[name], overheads.in_place_rates.get(name)
    return (MUON_UPDATE_RATE if name == "muon" else UPDATE_RATE), None


def _cost_model(options: Options) -> CostModel:
    name = options.cost_model or DEFAULT_COST_MODEL
    if options.activation_compression is not None and name == DEFAULT_COST_MODEL:
        raise UserError(
            "--activation-compression is for formulas, and pd-train sends activations as they are:"
            " add --cost-model paper, released or measured, or leave it out"
        )
    return COST_MODELS[name](options.activation_compression)
