"""Compares the planner's plan with others for the same graph and cluster, each simulated.

Three are baselines, made without a planner: equal layers, equal parameters, data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from pipedream.graph.errors import UserError
from pipedream.graph.plan import DraftPlan, Plan
from pipedream.graph.timeline import Panel, Timeline, panels_png
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.choose.expected import expected
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cost.models import PaperCost
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.cuts.planning_graph import Floats, PlanningGraph
from pipedream.optimizer.report.tables import show_meshes, show_replicas, table_of
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.outcome import Outcome, fixed_outcome
from pipedream.optimizer.search.placed_plan import placed_plan
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.optimizer.simulate.simulator import MOST_MOVES

if TYPE_CHECKING:
    import pandas as pd

_DRAWN, _RANKS = 8, 4
"""Minibatches, and ranks, drawn of each plan."""

_HALVINGS = 60

_MOST_CUTS = 1000
"""Cuts over which others' plans are searched: with all 71,175 of a Llama of 22 layers the plans
were the same, and took five times as long.
"""

_MOST_OF_LATENCY = 600
"""The same for latency, whose search takes longer."""

_LONG = 10_000
"""Stages times microbatches of a plan of others' whose rounds are extrapolated within 0.1 %."""


@dataclass(frozen=True)
class Candidate:
    """A plan to compare, or why there is none."""

    plan: DraftPlan | None
    problem: str | None

    @property
    def seconds(self) -> float | None:
        """Seconds per minibatch by the cost model: a batch's time divided by its minibatches."""
        return self.plan.predicted.seconds_shared_out if self.plan else None

    @property
    def simulated(self) -> float | None:
        """Seconds per minibatch as simulated; None if that takes too long."""
        recorded = self.plan.predicted.simulated if self.plan else None
        return recorded.seconds_per_minibatch if recorded else None

    @property
    def memory(self) -> float | None:
        """Bytes that the fullest worker needs."""
        return max(stage.memory_bytes for stage in self.plan.stages) if self.plan else None

    @property
    def figures(self) -> dict[str, object]:
        """The columns that every table of plans has as data."""
        return {
            "stages": self.plan and len(self.plan.stages),
            "replicas": self.plan and " ".join(map(str, self.plan.replicas)),
            "mesh": self.plan and show_meshes(self.plan),
            "seconds_per_minibatch": self.seconds,
            "simulated_seconds_per_minibatch": self.simulated,
        }


@dataclass(frozen=True)
class Contender(Candidate):
    """A named plan; `simulation` is None if that takes too long."""

    name: str
    simulation: Simulation | None = None
    fits: bool = False

    @property
    def is_on_mesh(self) -> bool:
        """Whether workers of a stage are several devices."""
        return self.plan is not None and any(stage.mesh for stage in self.plan.stages)


def compare(
    request: Request,
    microbatches: int,
    chosen: Plan | None,
    on_meshes: Sequence[Contender] = (),
) -> list[Contender]:
    """The plan chosen for the request, PipeDream's, Alpa's and four baselines; `microbatches` are
    for those with a flush. If the request leaves the choice to the simulator, PipeDream's and
    Alpa's are the best under the paper's cost model. `on_meshes`: further plans, which come first.
    """
    judged = request.cost_model.prices_plans
    ours = replace(
        request,
        model=PaperCost() if judged else request.model,
        latency=None,
        schedule="weight-stashing",
    )
    crowded = request.cluster.devices > len(PlanningGraph.of(request.graph))
    straight = replace(ours, rules=Rules(straight=True, fewer_machines=crowded))
    alpa = replace(ours, latency=Latency(microbatches), schedule="flush")
    makers: dict[str, Callable[[], Outcome]] = {
        "PipeDream": lambda: optimize(ours, _MOST_CUTS),
        "Alpa, one submesh a stage": lambda: optimize(alpa, _MOST_OF_LATENCY),
        "straight pipeline": lambda: optimize(straight, _MOST_CUTS),
        "GPipe, equal layers": lambda: equal_layers(ours, microbatches),
        "equal parameters": lambda: equal_parameters(ours),
        "data parallelism": lambda: data_parallel(ours),
    }
    contenders = [*on_meshes]
    if judged and chosen:
        contenders.append(_timed("this plan", chosen, request))
    for name, make in makers.items():
        try:
            checked = make().plan
            plan = _judged(checked, request) if judged else checked
        except UserError as error:
            contenders.append(Contender(None, error.format_message(), name))
        else:
            contenders.append(_timed(name, plan, request))
    return contenders


def equal_layers(request: Request, microbatches: int) -> Outcome:
    """As many nodes in each stage, an update per `microbatches` (GPipe, NeurIPS 2019)."""
    nodes, stages = len(request.planning), _most_stages(request)
    ends = [nodes * (stage + 1) // stages for stage in range(stages)]
    ours = replace(request, schedule="gpipe", microbatches=microbatches)
    outcome = fixed_outcome(ours, ends, [1] * stages)
    seconds = outcome.batch_seconds(Latency(microbatches))
    return outcome.predicting(microbatches=microbatches, latency_seconds=seconds)


def equal_parameters(request: Request) -> Outcome:
    """Minimizes the parameters of the stage that has most."""
    ends = balanced(request.planning.parameter_bytes, _most_stages(request))
    return fixed_outcome(request, ends, [1] * len(ends))


def _most_stages(request: Request) -> int:
    """Of a straight pipeline along one topological order."""
    return min(request.cluster.devices, len(request.planning))


def data_parallel(request: Request) -> Outcome:
    """The whole model on every device."""
    return fixed_outcome(request, [len(request.planning)], [request.cluster.devices])


def with_whole_model(outcome: Outcome, request: Request) -> Outcome:
    """The outcome of a plan for teams of devices, with what the whole model takes and needs on each
    of the request's devices.
    """
    try:
        whole = data_parallel(request)
    except UserError:  # nothing that the schedule allows
        return outcome
    varying = expected(whole.plan, request) if request.cost_model.prices_plans else None
    predicted = whole.plan.predicted
    seconds = predicted.seconds_per_minibatch if varying is None else varying.seconds
    changed = replace(outcome, whole_model_bytes=whole.whole_model_bytes)
    return changed.predicting(
        one_worker_seconds=predicted.one_worker_seconds,
        data_parallel_seconds=seconds,
    )


def on_single_devices(plan: Plan, request: Request) -> Candidate:
    """The plan with a replica of whole operators on each device of its meshes."""
    try:
        priced = _judged(plan, request)
    except UserError as error:
        return Candidate(None, error.format_message())
    simulation = request.simulate(priced)
    return Candidate(priced if simulation is None else simulation.noted_in(priced), None)


def balanced(weights: Floats, pieces: int) -> list[int]:
    """The ends of `pieces` non-empty runs of consecutive entries whose heaviest is as light as
    possible, up to rounding.

    Bisects the weight limit; runs are filled up to it from the left.
    """
    assert 0 < pieces <= len(weights)
    before = np.concatenate([[0.0], np.cumsum(weights)])
    low, high = float(weights.max()), float(before[-1])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(before, middle)) <= pieces else (middle, high)
    ends = _filled(before, high * (1 + 1e-12))
    while len(ends) < pieces:  # a run that is cut in two gets lighter
        begins = [0, *ends]
        sizes = [end - begin for begin, end in zip(begins, ends, strict=False)]
        longest = sizes.index(max(sizes))
        ends.insert(longest, ends[longest] - sizes[longest] // 2)
    return ends


def _filled(before: Floats, limit: float) -> list[int]:
    """Returns the ends of the longest runs that weigh at most `limit`."""
    ends = [0]
    while ends[-1] < len(before) - 1:
        end = int(np.searchsorted(before, before[ends[-1]] + limit, side="right")) - 1
        ends.append(max(end, ends[-1] + 1))
    return ends[1:]


def _judged(plan: Plan, request: Request) -> DraftPlan:
    """Prices the same stages on the same ranks as plans of the request are priced."""
    microbatches = plan.predicted.microbatches
    changed = replace(request, schedule=plan.schedule, latency=None, microbatches=microbatches)
    division = Division.of(plan, changed.planning)
    cuts = division.cuts(changed.planning)
    placed = division.placed(changed.cluster)
    return placed_plan(cuts, changed, placed, changed.memory_model(cuts)).plan


def as_contender(
    name: str, plan: Plan, simulation: Simulation | None, request: Request
) -> Contender:
    """A plan that has been simulated, for the devices of the request."""
    return Contender(plan, None, name, simulation, _fits(plan, request.device_types))


def _timed(name: str, plan: DraftPlan, request: Request) -> Contender:
    long = len(plan.stages) * (plan.predicted.microbatches or 0) > _LONG
    simulation = request.simulate(plan, MOST_MOVES, rough=long)
    if simulation is not None:
        plan = simulation.noted_in(plan)
    return Contender(plan, None, name, simulation, _fits(plan, request.device_types))


def _fits(plan: DraftPlan, device_types: DeviceTypes) -> bool:
    return all(
        stage.memory_bytes <= device_types.worst_of_ranks(stage.ranks, plan.cluster).memory
        for stage in plan.stages
    )


def comparison_table(contenders: list[Contender], microbatches: int) -> Table:
    """A row per plan; the best simulated time among those that fit is bold."""
    best = _fastest(contenders)
    left_out = set() if any(each.is_on_mesh for each in contenders) else {"mesh"}
    rows = [_cells(contender) for contender in contenders]
    table = table_of(
        "Other plans for the same graph and cluster",
        f"Per minibatch; with flush, of batches of {microbatches}. Closed form: by the cost model;"
        " simulated: the schedule, action by action, the best that fits in bold. Waiting: the share"
        " of the workers' time that is not computing. Memory: of the fullest worker.",
        [{name: row[name] for name in row if name not in left_out} for row in rows],
        bold=[n for n, contender in enumerate(contenders) if contender in best],
        wrapped=("plan", "schedule"),
    )
    for column in table.columns:  # names of one word
        column.no_wrap |= column.header == "schedule"
    return table


def _fastest(contenders: Sequence[Contender]) -> list[Contender]:
    """Returns those that fit and have the best simulated time."""
    seconds = [c.simulated for c in contenders if c.fits and c.simulated is not None]
    return [c for c in contenders if c.fits and seconds and c.simulated == min(seconds)]


def _cells(contender: Contender) -> dict[str, str]:
    plan, simulation = contender.plan, contender.simulation
    if plan is None:
        return {"plan": contender.name, "": no_plan(contender.problem or "")}
    cells = {
        "plan": contender.name,
        "schedule": plan.schedule,
        "replicas\nof stages": show_replicas(plan.replicas),
        "mesh": show_meshes(plan),
        "closed\nform": show_seconds(contender.seconds or 0.0),
        "simulated": "-" if simulation is None else show_seconds(simulation.seconds_per_minibatch),
        "waiting": "-" if simulation is None else f"{simulation.bubble:.1%}",
        "memory": show_bytes(contender.memory or 0.0),
    }
    return cells if contender.fits else cells | {"": "does not fit"}


def no_plan(problem: str) -> str:
    """Why there is no plan, in short."""
    return "does not fit" if "no plan fits" in problem else "no plan"


def comparison_frame(contenders: list[Contender]) -> pd.DataFrame:
    """The table as data: seconds, bytes and shares."""
    import pandas as pd

    return pd.DataFrame(
        {
            "plan": contender.name,
            "schedule": contender.plan and contender.plan.schedule,
            **contender.figures,
            "bubble": contender.simulation and contender.simulation.bubble,
            "memory_bytes": contender.memory,
            "fits": contender.fits,
            "problem": contender.problem,
        }
        for contender in contenders
    )


def comparison_png(contenders: list[Contender]) -> bytes | None:
    """Draws the steady states one under the other (PNG); None if none was simulated."""
    best = _fastest(contenders)
    panels = [
        Panel(
            ("Fastest: " if contender in best else "") + f"{contender.name},"
            f" {show_seconds(simulation.seconds_per_minibatch)} per minibatch",
            _events(contender, simulation),
            first=simulation.steady_from,
            count=_DRAWN,
            most_rows=_RANKS,
        )
        for contender in contenders
        if (simulation := contender.simulation) is not None
    ]
    return panels_png(panels) if panels else None


def _events(contender: Contender, simulation: Simulation) -> Timeline:
    assert contender.plan is not None
    rank_of = simulation.rank_of(contender.plan)
    return {device: simulation.events[rank] for device, rank in rank_of.items()}
