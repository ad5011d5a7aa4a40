"""Turns the options of `pd-optimize` into a task, and checks them before planning starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipedream.graph.choices import DEFAULT_ORDER, IntraOp, ScheduleName, Zero
from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.placements.operators import OperatorProfile
from pipedream.graph.placements.placement import Mesh, device_count
from pipedream.graph.profile import Footprint, Profile, ProfiledProcess, TrainingOverheads
from pipedream.graph.units import show_bytes
from pipedream.optimizer.calibrate.further_profiles import at_their_mean, levels_of
from pipedream.optimizer.calibrate.runs import CalibrationRun
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.cli.calibration import Calibration
from pipedream.optimizer.cli.cluster_options import bytes_of, cluster_of
from pipedream.optimizer.cli.inputs import (
    any_profile,
    graph_of,
    has_profile,
    operators_of,
    profile_of,
)
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.compare.comparison import with_whole_model
from pipedream.optimizer.compare.sweep import check_sweep, parse_range
from pipedream.optimizer.cost.memory import ROOM_ON_GPU
from pipedream.optimizer.cost.models import COST_MODELS, DEFAULT_COST_MODEL, CostModel
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.cuts.groups import classes_of, fusion_groups, whole_modules
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.search.split import Split, split_of
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
from pipedream.optimizer.simulate.workload import UPDATE_RATE
from pipedream.schedule.policy import uniform_updates

_OTHER_KIND = 10
"""Devices so many times as fast as the one profiled, or as slow, are of another kind: what was
measured of its allocator is not true of theirs."""

_WHOLE_PASSES = (None, DEFAULT_ORDER, "interleaved")
"""Orders whose backward passes are not in halves."""


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
        return with_whole_model(found, self.of_devices)

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
    options = _with_schedule(options)
    cluster = cluster_of(options)
    memory = None if options.memory is None else bytes_of("--memory", options.memory)
    latency, in_rounds = _latency(options), _in_rounds(options)
    rate = None if options.update_rate is None else bytes_of("--update-rate", options.update_rate)
    numbers = None if options.sweep is None else parse_range(options.sweep)
    if numbers is not None:
        check_sweep(cluster, numbers)
    _check_files(options)
    profiled, profile, runs = _read_model(options)
    overheads = _overheads(options, profiled, profile)
    schedule, cost_model = _schedule(options, latency), _cost_model(options)
    operators = _operators(options, profiled, profile)
    rates = {} if overheads is None else overheads.update_rates
    request = Request(
        graph=profiled,
        cluster=cluster,
        model=cost_model,
        schedule=schedule,
        memory=memory,
        room=_room(options, profile, cluster),
        process=_process(profile, cluster),
        rules=Rules(options.straight, options.fewer_machines),
        latency=latency,
        optimizer=options.optimizer,
        recompute=options.recompute,
        zero=_zero(options),
        host_bandwidth=None
        if options.host_bandwidth is None
        else bytes_of("--host-bandwidth", options.host_bandwidth),
        selective=profile is None or profile.compile is None,  # what is compiled runs as a whole
        in_flight=options.in_flight,
        update_rate=rate or rates.get(options.optimizer, UPDATE_RATE),
        overheads=overheads,
        footprints=_footprints(options, profile),
        microbatches=options.microbatches if in_rounds else None,
        weight_prediction=options.weight_prediction,
        order=options.order,
        stages_each=options.stages_per_rank,
        sharing=() if profile is None else profile.learned_together,
        split=_split(options, profiled, profile),
        groups=_groups(options, profiled, operators, profile),
    )
    calibration = Calibration.of(runs, request, options, profile)
    request = calibration.corrected(request)
    _check_room(request)
    any_schedule = options.schedule is None and latency is None and not options.weight_prediction
    batch_size = None if profile is None else profile.batch_size
    task = Task(
        *(request, numbers, profile, calibration, profiled, batch_size, any_schedule),
        operators=operators,
    )
    if options.mesh is None:
        return task
    return task.on_mesh(parse_mesh(options.mesh), options.shard, options.intra_op)


def with_fitting_mesh(options: Options) -> Options:
    """Without the mesh of an earlier plan, where its teams do not divide the cluster that there is
    now: then the best one is searched. Raises UserError.
    """
    if options.mesh is None or "mesh" in options.typed:
        return options
    if cluster_of(options).machines[0] % device_count(parse_mesh(options.mesh)) == 0:
        return options
    return replace(options, mesh=None, shard=())


def _room(options: Options, profile: Profile | None, cluster: Cluster) -> float:
    """Returns the bytes of a device that are not the model's. Raises UserError."""
    if options.room is not None:
        return 0.0 if options.room == "0" else bytes_of("--room", options.room)
    process = _process(profile, cluster)
    if process is not None:
        return process.baseline_bytes
    return 0.0 if profile is None or profile.machine.device == "cpu" else ROOM_ON_GPU


def _process(profile: Profile | None, cluster: Cluster) -> ProfiledProcess | None:
    """Returns what a process of the profiled machine holds, if devices are of its kind."""
    alike = all(1 / _OTHER_KIND < kind.speed < _OTHER_KIND for kind in cluster.kinds)
    return profile.process if profile is not None and alike else None


def _zero(options: Options) -> Zero:
    """Returns whether replicas may divide the optimizer's state. Raises UserError."""
    if not options.weight_prediction:
        return options.zero
    if options.zero == "always":
        raise UserError(
            "--zero always: replicas that divide updates know the last step of their parts alone,"
            " and weight prediction needs all of it: leave --weight-prediction or --zero out"
        )
    return "never"


def _check_room(request: Request) -> None:
    """Raises UserError if a device has no bytes for the model."""
    if request.device_types.smallest_memory <= 0:
        raise UserError(
            f"--room {show_bytes(request.room)}: a device has no more memory than that, which is"
            f" for {request.room_for}: give more --memory or less --room"
        )


def _read_model(options: Options) -> tuple[Graph, Profile | None, Sequence[CalibrationRun]]:
    """Reads the graph, its profile, and the runs to correct its times by. Raises UserError."""
    graph = graph_of(options)
    runs = [CalibrationRun.read(folder) for folder in options.calibrate]
    profile = profile_of(options, graph)
    if profile is not None:
        graph = profile.divide_backward(graph)
    graph = at_their_mean(graph, _further_levels(options, graph, profile))
    for run in runs:
        run.check(graph, options.graph_path, options.profile_path, profile)
    return graph, profile, runs


def _further_levels(options: Options, graph: Graph, profile: Profile | None) -> tuple[float, ...]:
    """Returns how slow the machine was in each profile of --again. Raises UserError."""
    if not options.again:
        return ()
    if profile is None:
        raise UserError(
            f"--again {options.again[0]}: there is no {options.profile_path} of this graph to"
            " compare with: run pd-profile again"
        )
    return levels_of(profile, graph, options.again)


def _overheads(options: Options, graph: Graph, profile: Profile | None) -> TrainingOverheads | None:
    """Returns the costs of training that were profiled, and how sure all times are."""
    if profile is None or profile.footprints is None:
        return None
    found = profile.training_overheads
    others = _further_levels(options, graph, profile)
    return replace(found, uncertainty=found.uncertainty._replace(others=others))


def _schedule(options: Options, latency: Latency | None) -> ScheduleName:
    schedule = options.schedule or ("weight-stashing" if latency is None else "flush")
    if options.weight_prediction and schedule != "weight-stashing":
        raise UserError(
            f"--weight-prediction is for weight-stashing, and the schedule is {schedule}: leave one"
            " of them out"
        )
    return schedule


def _cost_model(options: Options) -> CostModel:
    name = options.cost_model or DEFAULT_COST_MODEL
    if options.activation_compression is not None and name == DEFAULT_COST_MODEL:
        raise UserError(
            "--activation-compression is for formulas, and pd-train sends activations as they are:"
            " add --cost-model paper, released or measured, or leave it out"
        )
    return COST_MODELS[name](options.activation_compression)


def _operators(options: Options, graph: Graph, profile: Profile | None) -> OperatorProfile | None:
    """Returns the operators of the graph, if they may be divided and are wanted. Raises UserError
    where they are asked for and cannot be had.
    """
    asked = _asks_for_operators(options)
    if options.intra_op == "none" or not (asked or _may_be_divided(options)):
        return None
    if profile is not None and profile.no_operators is not None and asked:
        raise UserError(
            f"{asked}: the model cannot run on a mesh: {profile.no_operators}; plan it without"
            f" {asked.split()[0]}"
        )
    path = options.graph_path.with_name("operators.json")
    operators = None if profile is None else operators_of(options)
    if operators is None and asked:
        raise UserError(
            f"{asked}: there is no {path if profile else options.profile_path}: pd-profile writes"
            " it with graph.txt"
        )
    if operators is None or operators.fingerprint == graph.fingerprint:
        return operators
    if asked:
        raise UserError(f"{path}: the operators of another graph: run pd-profile again")
    return None


def _asks_for_operators(options: Options) -> str | None:
    """Returns the option that says that operators are to be divided. Raises UserError if options
    contradict each other.
    """
    if options.mesh is None and options.shard:
        raise UserError("--shard needs --mesh: add --mesh 2, or leave it out")
    if options.mesh is not None:
        if options.intra_op == "none":
            raise UserError(
                "--intra-op none divides no operators, which is what --mesh is for: leave one out"
            )
        return "--mesh"
    return f"--intra-op {options.intra_op}" if options.intra_op not in ("auto", "none") else None


def _may_be_divided(options: Options) -> bool:
    """Whether --intra-op auto looks for shardings: not where the user says what the stages are, or
    takes another cost model.
    """
    given = (options.split, options.replicas, options.order, options.straight)
    return not any(given) and options.cost_model in (None, DEFAULT_COST_MODEL)


def parse_mesh(text: str) -> Mesh:
    """The sizes of the axes of --mesh. Raises UserError."""
    try:
        sizes = tuple(map(int, text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UserError(f"--mesh {text}: write the size of each axis, such as 2 or 2,4")
    return sizes


def _split(options: Options, graph: Graph, profile: Profile | None) -> Split | None:
    """Returns the stages that --split and --replicas give. Raises UserError."""
    if options.split is None and options.replicas is None:
        return None
    option = "--split" if options.split is not None else "--replicas"
    others = {
        "--straight": options.straight,
        "--fewer-machines": options.fewer_machines,
        "--layers": options.layers,
        "--epsilon": options.epsilon,
        "--sweep": options.sweep,
        f"--cost-model {options.cost_model}": options.cost_model not in (None, "network"),
    }
    for other in filter(others.get, others):
        raise UserError(f"{option} says what the stages are, to be simulated: leave out {other}")
    names = tuple(name.strip() for name in (options.split or "").split(",") if name.strip())
    try:
        counts = None if options.replicas is None else list(map(int, options.replicas.split(",")))
    except ValueError:
        counts = [0]
    if counts is not None and min(counts) < 1:
        raise UserError(f"--replicas {options.replicas}: write a number for each stage: 2,1,1")
    return split_of(names, counts, graph, {} if profile is None else profile.modules)


def _footprints(options: Options, profile: Profile | None) -> Mapping[str, Footprint] | None:
    """Returns what nodes keep in memory, in whole passes or in halves."""
    footprints = None if profile is None else profile.footprints
    if footprints is None or options.order in _WHOLE_PASSES:
        return footprints
    return {name: each.in_programs for name, each in footprints.items()}


def _groups(
    options: Options, graph: Graph, operators: OperatorProfile | None, profile: Profile | None
) -> tuple[tuple[str, ...], ...]:
    """Returns the groups of nodes that --group keeps whole. Raises UserError."""
    if options.group == "none":
        return ()
    option = "--split" if options.split is not None else "--replicas"
    if options.split is not None or options.replicas is not None:
        raise UserError(f"{option} says what the stages are: leave out --group {options.group}")
    planning = PlanningGraph.of(graph)
    if options.group == "fusion":
        return fusion_groups(planning, classes_of(graph, operators))
    if profile is None:
        raise UserError(
            "--group module: needs the profile.json beside graph.txt, which names the modules: run"
            " pd-profile, or leave it out"
        )
    return whole_modules(planning, profile.modules)


def _with_schedule(options: Options) -> Options:
    """Returns the options with the schedule that --order is for. Raises UserError."""
    if options.order in (None, DEFAULT_ORDER):
        if options.stages_per_rank not in (None, 1):
            raise UserError(
                f"--stages-per-rank {options.stages_per_rank}: order {DEFAULT_ORDER} has one stage"
                " on each rank: add --order interleaved, zb-v or auto"
            )
        return options
    excluded = {
        f"--schedule {options.schedule}": options.schedule not in (None, "flush"),
        "--objective latency": options.objective == "latency",
        f"--cost-model {options.cost_model}": options.cost_model not in (None, "network"),
    }
    for other in filter(excluded.get, excluded):
        raise UserError(
            f"--order {options.order} is for schedule flush, most minibatches per second, and"
            f" plans that are simulated: leave out {other}"
        )
    return replace(options, schedule="flush")


def _in_rounds(options: Options) -> bool:
    """Returns whether an update is per --microbatches. Raises UserError if nothing uses these."""
    in_rounds = options.schedule is not None and uniform_updates(options.schedule)
    unused = not (in_rounds or options.compare or options.objective == "latency")
    if unused and options.microbatches is not None:
        raise UserError(
            "--microbatches needs --objective latency, or --schedule flush, gpipe or 2bw: add one"
            " of these, or leave it out"
        )
    return in_rounds


def with_global_batch(options: Options) -> Options:
    """Returns the options with as many microbatches as --global-batch has of the profile's batch
    size. Raises UserError if nothing uses it, or it cannot be divided so.
    """
    whole = options.global_batch
    if whole is None:
        return options
    if options.objective != "latency" and not _in_rounds(replace(options, microbatches=None)):
        raise UserError(
            f"--global-batch: {options.schedule or 'weight-stashing'} updates after every"
            " minibatch: add --schedule flush, gpipe or 2bw, or --objective latency"
        )
    if isinstance(options.graph, Path) and options.graph.is_dir():
        return options
    if "microbatches" in options.typed:
        raise UserError(
            "--global-batch and --microbatches both set the examples per update: give one of them"
        )
    profile = any_profile(options)
    if profile is None:
        raise UserError(
            f"--global-batch: without {options.profile_path} the batch size of"
            f" {options.graph_path} is not known: give --microbatches"
        )
    count, rest = divmod(whole, profile.batch_size)
    if rest:
        raise UserError(
            f"--global-batch {whole}: is not a multiple of {profile.batch_size}, the batch size of"
            f" {options.profile_path}"
        )
    return replace(options, microbatches=count)


def _latency(options: Options) -> Latency | None:
    """Returns the goal of --objective latency, None for throughput. Raises UserError."""
    typed = {"--epsilon": options.epsilon, "--layers": options.layers}
    if options.objective == "throughput":
        for option, value in typed.items():
            if value is not None:
                raise UserError(f"{option} needs --objective latency: add that, or leave it out")
        return None
    if options.microbatches is None:
        raise UserError("--objective latency: add --microbatches B, the number in one batch")
    if options.schedule not in (None, "flush", "gpipe"):
        raise UserError(
            "--objective latency plans for the schedules flush and gpipe: leave out"
            f" --schedule {options.schedule}"
        )
    return Latency(options.microbatches, options.epsilon or 0.0, options.layers)


def _check_files(options: Options) -> None:
    """Raises UserError for a folder that cannot be written, or --export without a profile."""
    if options.output is not None:
        _check_folder(options, options.output)
    if options.export and not has_profile(options):
        raise UserError(
            f"--export {options.export[0]} needs {options.profile_path}: pd-profile writes it with"
            " graph.txt"
        )


def _check_folder(options: Options, folder: Path) -> None:
    graph = options.graph_path
    if options.calibrate and folder.resolve() == graph.resolve().parent:
        raise UserError(
            f"-o {folder}: {graph} would be overwritten by the graph with corrected times: name"
            " another folder"
        )
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"-o {folder}: cannot be written: {there} is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"-o {folder}: cannot be written: no permission to write in {there}")
