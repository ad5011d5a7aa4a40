"""The options of `pd-optimize`, group by group, and their values as they were typed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipedream.graph.choices import SCHEDULES
from pipedream.graph.command import FiniteRange

if TYPE_CHECKING:
    from pipedream.graph.choices import InFlight, OptimizerName, Recompute, ScheduleName


def _as_that_plan(context: click.Context, _parameter: click.Parameter, path: Path | None) -> Any:
    """Its options in place of the defaults; what is typed goes first."""
    if path is not None:
        from pipedream.graph.plan import read_plan
        from pipedream.optimizer.cli.like import options_of

        known = options_of(read_plan(path), path)
        context.default_map = {name: value for name, value in known.items() if value is not None}
    return path


def _as_that_run(
    context: click.Context, _parameter: click.Parameter, runs: tuple[Path, ...]
) -> Any:
    """The options of the newest run's plan in place of the defaults, its optimizer as measured."""
    if runs:
        from pipedream.optimizer.calibrate.runs import CalibrationRun
        from pipedream.optimizer.cli.like import options_after

        context.default_map = options_after(CalibrationRun.read(runs[-1]))
    return runs


_CLUSTER = (
    click.option(
        "--cluster",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Cluster file: levels, measured links, kinds of device. In place of the next three.",
    ),
    click.option(
        "--machines",
        metavar="N,N,...",
        help="Components of each level, innermost first: 4,2 is 2 machines of 4 devices.",
    ),
    click.option(
        "--bandwidth",
        metavar="B,B,...",
        help="Bytes per second of each level, innermost first: 10GB,1GB.",
    ),
    click.option(
        "--latency",
        metavar="T,T,...",
        help="What any message takes at each level, innermost first: 5us,50us.  [default: nothing]",
    ),
    click.option(
        "--like",
        type=click.Path(path_type=Path),
        metavar="PLAN",
        is_eager=True,
        callback=_as_that_plan,
        help="For the cluster of this plan.json, and with the options that it was made with where"
        " they are not given.",
    ),
    click.option(
        "--workers",
        type=click.IntRange(min=1),
        metavar="N",
        help="With --like or --calibrate: for so many of its devices.",
    ),
    click.option(
        "--calibrate",
        type=click.Path(path_type=Path),
        metavar="RUN",
        multiple=True,
        is_eager=True,
        callback=_as_that_run,
        help="Correct the times of GRAPH by what pd-train measured in this run's folder, and say"
        " whether another plan is better now. Cluster and options are those of the run's plan"
        " where they are not given. May be repeated, the newest run last.",
    ),
)
_OUTPUT = (
    click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder for plan.json, graph.txt and graph.svg.  [default: GRAPH's folder/plan]",
    ),
    click.option(
        "--export",
        "exports",
        type=click.Choice(["torch", "torchtitan", "deepspeed", "megatron"]),
        multiple=True,
        help="Write the plan for another framework, too; may be repeated.",
    ),
)
_PLAN = (
    click.option(
        "--cost-model",
        type=click.Choice(["paper", "released", "measured"]),
        help="PipeDream's formulas as published, as its released optimizer has them, or latencies"
        " and links as measured.  [default: measured for a cluster file with measured links, else"
        " paper]",
    ),
    click.option(
        "--schedule",
        type=click.Choice(SCHEDULES),
        help="[default: weight-stashing; flush for --objective latency]",
    ),
    click.option("--straight", is_flag=True, help="No replication: one stage on each device."),
    click.option(
        "--fewer-machines", is_flag=True, help="Leave machines unused where that is better."
    ),
    click.option(
        "--activation-compression",
        type=FiniteRange(min=0, min_open=True),
        metavar="R",
        help="By what factor the bytes between stages are compressed (released: 1 to count them).",
    ),
)
_MEMORY = (
    click.option(
        "--memory", metavar="BYTES", help="What each device has, as 16GB.  [default: as it takes]"
    ),
    click.option(
        "--optimizer",
        type=click.Choice(["sgd", "momentum", "adam"]),
        default="adam",
        show_default=True,
        help="Whose state takes memory: none, one or two tensors for each parameter.",
    ),
    click.option(
        "--weight-prediction",
        is_flag=True,
        help="The run config has asynchronous: weight_prediction, which takes memory, too.",
    ),
    click.option(
        "--recompute",
        type=click.Choice(["never", "auto", "always"]),
        default="auto",
        show_default=True,
        help="Do a stage's forward pass again before its backward pass; auto: where --memory asks"
        " it.",
    ),
    click.option(
        "--in-flight",
        type=click.Choice(["useful", "least"]),
        default="useful",
        show_default=True,
        help="Minibatches between forward and backward: as many as keep the pace and have room, or"
        " PipeDream's number, for less memory and fresher weights.",
    ),
    click.option(
        "--profile",
        type=click.Path(path_type=Path),
        help="What the layers keep in memory, and their modules."
        "  [default: profile.json beside GRAPH, if it is there]",
    ),
)
_OBJECTIVE = (
    click.option(
        "--objective",
        type=click.Choice(["throughput", "latency"]),
        default="throughput",
        show_default=True,
        help="The most minibatches per second, or the least time for a batch of --microbatches.",
    ),
    click.option(
        "--microbatches",
        type=click.IntRange(min=1),
        metavar="B",
        help="For latency: the minibatches of GRAPH that make one batch; with --schedule flush,"
        " gpipe or 2bw: one update.  [default: 4]  For --compare, the same of plans with a flush."
        "  [default: 4 for each device]",
    ),
    click.option(
        "--global-batch",
        type=click.IntRange(min=1),
        metavar="N",
        help="Where GRAPH is a folder: the examples of one update; each batch size that divides it"
        " is tried with as many microbatches as make it.",
    ),
    click.option(
        "--epsilon",
        type=FiniteRange(min=0),
        metavar="SECONDS",
        help="For latency: give up as much for each microbatch, to plan faster.  [default: 0]",
    ),
    click.option(
        "--layers",
        type=click.IntRange(min=1),
        metavar="L",
        help="For latency: make the graph into L layers first and cut between these alone.",
    ),
)
_SIMULATION = (
    click.option(
        "--timeline",
        is_flag=True,
        help="Draw the simulated schedule: timeline.png, timeline.json (Perfetto), memory.png.",
    ),
    click.option(
        "--compare",
        is_flag=True,
        help="Set the plan beside five others, each simulated: a table, compare.csv, compare.png.",
    ),
    click.option(
        "--sweep",
        metavar="FIRST..LAST",
        help="Plan for so many workers, too, as 1..64: a table, sweep.csv, sweep.png. They fill"
        " machines as --machines has them; the outermost level grows.",
    ),
    click.option(
        "--update-rate",
        metavar="BYTES",
        help="Parameters that the optimizer updates on a device in a second.  [default: as the"
        " profile has it, else 50GB; in the simulation alone]",
    ),
)


@dataclass(frozen=True)
class Options:
    """What was typed, None where nothing was: a field for each option, by its name."""

    graph: Path

    cluster: Path | None
    machines: str | None
    bandwidth: str | None
    latency: str | None
    like: Path | None
    workers: int | None
    calibrate: tuple[Path, ...]

    output: Path | None
    exports: tuple[str, ...]

    cost_model: str | None
    schedule: ScheduleName | None
    straight: bool
    fewer_machines: bool
    activation_compression: float | None

    memory: str | None
    optimizer: OptimizerName
    weight_prediction: bool
    recompute: Recompute
    in_flight: InFlight
    profile: Path | None

    objective: str
    microbatches: int | None
    global_batch: int | None
    epsilon: float | None
    layers: int | None

    timeline: bool
    compare: bool
    sweep: str | None
    update_rate: str | None

    @property
    def folder(self) -> Path:
        if self.output is not None:
            return self.output
        return (self.graph if self.graph.is_dir() else self.graph.parent) / "plan"

    @property
    def made(self) -> Path:
        """The profile that the graph was made with."""
        return self.profile or self.graph.with_name("profile.json")


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with GRAPH and all options, as --help lists them."""
    groups = (_CLUSTER, _OUTPUT, _PLAN, _MEMORY, _OBJECTIVE, _SIMULATION)
    for option in reversed([option for group in groups for option in group]):
        command = option(command)
    return click.argument("graph", type=click.Path(path_type=Path))(command)
