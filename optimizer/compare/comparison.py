"""Compares the planner's plan with others for the same graph and cluster, each simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan
from pipedream.graph.timeline import Panel, draw_panels
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.optimizer.compare.baselines import data_parallel, equal_layers, equal_parameters
from pipedream.optimizer.cost.device_types import DeviceTypes
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.search.stages import Rules
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.optimizer.simulate.simulator import simulate_plan

if TYPE_CHECKING:
    import pandas as pd

_DRAWN = 8
"""Ranks and minibatches drawn of each plan."""

_MOST_COUNTS = 6


@dataclass(frozen=True)
class Contender:
    """A named plan, or why there is none; `simulation` is None if that takes too long."""

    name: str
    plan: Plan | None
    problem: str | None
    simulation: Simulation | None
    fits: bool = True

    @property
    def seconds(self) -> float | None:
        """Seconds per minibatch by the closed form: a batch's time divided by its minibatches."""
        return self.plan.predicted.seconds_shared_out if self.plan else None

    @property
    def memory(self) -> float | None:
        """Bytes that the fullest worker needs."""
        return max(stage.memory_bytes for stage in self.plan.stages) if self.plan else None


def compare(request: Request, microbatches: int) -> list[Contender]:
    """PipeDream's plan, Alpa's and four baselines; `microbatches` are for those with a flush."""
    ours = replace(request, latency=None, schedule="weight-stashing")
    crowded = request.cluster.devices > len(PlanningGraph.of(request.graph))
    straight = replace(ours, rules=Rules(straight=True, fewer_machines=crowded))
    alpa = replace(ours, latency=Latency(microbatches), schedule="flush")
    makers: dict[str, Callable[[], Outcome]] = {
        "PipeDream": lambda: optimize(ours),
        "Alpa, one submesh a stage": lambda: optimize(alpa),
        "straight pipeline": lambda: optimize(straight),
        "GPipe, equal layers": lambda: equal_layers(ours, microbatches),
        "equal parameters": lambda: equal_parameters(ours),
        "data parallelism": lambda: data_parallel(ours),
    }
    return [_contender(name, make, request) for name, make in makers.items()]


def _contender(name: str, make: Callable[[], Outcome], request: Request) -> Contender:
    try:
        plan = make().plan
    except UserError as error:
        return Contender(name, None, error.format_message(), None, fits=False)
    simulation = simulate_plan(
        plan, request.graph, update_rate=request.update_rate, overheads=request.overheads
    )
    if simulation is not None:
        plan = simulation.noted_in(plan)
    return Contender(name, plan, None, simulation, _fits(plan, request.device_types))


def _fits(plan: Plan, device_types: DeviceTypes) -> bool:
    machine = plan.cluster.machine
    devices = [device_types.worst_of_machines(map(machine, stage.ranks)) for stage in plan.stages]
    pairs = zip(plan.stages, devices, strict=True)
    return all(stage.memory_bytes <= device.memory for stage, device in pairs)


def comparison_table(contenders: list[Contender], microbatches: int) -> Table:
    """A row per plan; the best simulated time among those that fit is bold."""
    table = Table(
        title="Other plans for the same graph and cluster",
        caption=f"Per minibatch; with flush, of batches of {microbatches}. Closed form: by the cost"
        " model; simulated: the schedule, action by action, the best that fits in bold. Waiting:"
        " the share of the workers' time that is not computing. Memory: of the fullest worker.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("plan")
    table.add_column("schedule", no_wrap=True)
    table.add_column("replicas\nof stages", justify="right")
    for heading in ("closed\nform", "simulated", "waiting", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    if not all(contender.fits for contender in contenders):
        table.add_column("")
    simulated = [c.simulation.seconds_per_minibatch for c in contenders if c.simulation and c.fits]
    best = min(simulated, default=None)
    for contender in contenders:
        simulation = contender.simulation
        winner = simulation and contender.fits and simulation.seconds_per_minibatch == best
        row = _row(contender)[: len(table.columns)]
        table.add_row(*row, style="bold" if winner else None)
    return table


def _row(contender: Contender) -> tuple[str, ...]:
    plan, simulation = contender.plan, contender.simulation
    if plan is None:
        return (contender.name, "", "", "", "", "", "", no_plan(contender.problem or ""))
    return (
        contender.name,
        plan.schedule,
        show_replicas(plan.replicas),
        show_seconds(contender.seconds or 0.0),
        "-" if simulation is None else show_seconds(simulation.seconds_per_minibatch),
        "-" if simulation is None else f"{simulation.bubble:.1%}",
        show_bytes(contender.memory or 0.0),
        "" if contender.fits else "does not fit",
    )


def no_plan(problem: str) -> str:
    """Why there is no plan, in short."""
    return "does not fit" if "no plan fits" in problem else "no plan"


def show_replicas(replicas: tuple[int, ...]) -> str:
    """`2 x 3, 1`: two stages of three replicas, then one of one."""
    runs: list[tuple[int, int]] = []
    for count in replicas:
        if runs and runs[-1][1] == count:
            runs[-1] = runs[-1][0] + 1, count
        else:
            runs.append((1, count))
    shown = [f"{times} x {count}" if times > 1 else str(count) for times, count in runs]
    if len(shown) > _MOST_COUNTS:
        return f"{len(replicas)} stages"
    return ", ".join(shown)


def comparison_frame(contenders: list[Contender]) -> pd.DataFrame:
    """The table as data: seconds, bytes and shares."""
    import pandas as pd

    return pd.DataFrame(
        {
            "plan": contender.name,
            "schedule": contender.plan and contender.plan.schedule,
            "stages": contender.plan and len(contender.plan.stages),
            "replicas": contender.plan and " ".join(map(str, contender.plan.replicas)),
            "seconds_per_minibatch": contender.seconds,
            "simulated_seconds_per_minibatch": simulation and simulation.seconds_per_minibatch,
            "bubble": simulation and simulation.bubble,
            "memory_bytes": contender.memory,
            "fits": contender.fits,
            "problem": contender.problem,
        }
        for contender in contenders
        for simulation in [contender.simulation]
    )


def draw_comparison(contenders: list[Contender], path: Path) -> None:
    """Draws the timelines one under the other (PNG), on one scale, from their steady states on."""
    panels = [
        Panel(
            f"{contender.name}: {show_seconds(simulation.seconds_per_minibatch)} per minibatch",
            simulation.events,
            first=simulation.steady_from,
            count=_DRAWN,
            most_rows=_DRAWN,
        )
        for contender in contenders
        if (simulation := contender.simulation) is not None
    ]
    if panels:
        draw_panels(panels, path)
