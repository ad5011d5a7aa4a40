"""The options of `pd-optimize` as click knows them, under the headings of --help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipedream.graph.choices import SCHEDULES
from pipedream.graph.command import FiniteRange

EXAMPLES = (
    "pd-optimize profiles/vgg16/graph.txt --machines 4,2 --bandwidth 10GB,1GB --memory 16GB",
    "pd-optimize graph.txt --cluster cluster.yaml --objective latency --microbatches 8",
)


def _options_of_plan(context: click.Context, _parameter: click.Parameter, path: Path | None) -> Any:
    """Makes the options of the plan the defaults."""
    if path is not None:
        from pipedream.graph.plan import read_plan
        from pipedream.optimizer.cli.like import options_of

        known = options_of(read_plan(path), path)
        context.default_map = {name: value for name, value in known.items() if value is not None}
    return path


def _options_of_run(
    context: click.Context, _parameter: click.Parameter, runs: tuple[Path, ...]
) -> Any:
    """Makes the options of the newest run's plan the defaults, its update rate as measured."""
    if runs:
        from pipedream.optimizer.calibrate.runs import CalibrationRun
        from pipedream.optimizer.cli.like import options_after

        context.default_map = options_after(CalibrationRun.read(runs[-1]))
    return runs


_PATH = click.Path(path_type=Path)
_OPTIONS: dict[str, tuple[click.Option, ...]] = {
    "Cluster": (
        click.Option(
            ["--cluster"],
            type=_PATH,
            metavar="FILE",
            help="Cluster file: levels, measured links, types of device. Instead of --machines,"
            " --bandwidth and --latency.  [default: none]",
        ),
        click.Option(
            ["--machines"],
            metavar="N,N,...",
            help="Number of components of each level, innermost first: 4,2 is 2 machines of 4"
            " devices.  [required without --cluster, --like or --calibrate]",
        ),
        click.Option(
            ["--bandwidth"],
            metavar="B,B,...",
            help="Bytes per second of each level, innermost first: 10GB,1GB.  [required with"
            " --machines]",
        ),
        click.Option(
            ["--latency"],
            metavar="T,T,...",
            help="Seconds of a message at each level, innermost first: 5us,50us.  [default: 0]",
        ),
        click.Option(
            ["--like"],
            type=_PATH,
            metavar="PLAN",
            is_eager=True,
            callback=_options_of_plan,
            help="Take the cluster of this plan.json, and its options as defaults.  [default:"
            " none]",
        ),
        click.Option(
            ["--workers"],
            type=click.IntRange(min=1),
            metavar="N",
            help="With --like or --calibrate: plan for N devices of that cluster.  [default: all]",
        ),
    ),
    "Model of cost": (
        click.Option(
            ["--profile"],
            type=_PATH,
            help="profile.json with the memory and modules of the layers.  [default: profile.json"
            " beside GRAPH, if there]",
        ),
        click.Option(
            ["--cost-model"],
            type=click.Choice(["paper", "released", "measured"]),
            help="PipeDream's formulas as published (paper) or as released, or latencies and links"
            " as measured.  [default: measured if the cluster file has measured links, else"
            " paper]",
        ),
        click.Option(
            ["--activation-compression"],
            type=FiniteRange(min=0, min_open=True),
            metavar="R",
            help="Divide the bytes between stages by R; the released model counts them only with"
            " this option.  [default: no compression]",
        ),
        click.Option(
            ["--update-rate"],
            metavar="BYTES",
            help="Bytes of parameters that the optimizer updates per second.  [default: the"
            " profile's; else 50GB, in the simulation only]",
        ),
        click.Option(
            ["--calibrate"],
            type=_PATH,
            metavar="RUN",
            multiple=True,
            is_eager=True,
            callback=_options_of_run,
            help="Correct the times of GRAPH by what pd-train measured in this run folder, and say"
            " whether another plan is better now. Takes the cluster and options of the run's plan"
            " as defaults. Repeat for more runs, newest last.  [default: none]",
        ),
    ),
    "Plan": (
        click.Option(
            ["--objective"],
            type=click.Choice(["throughput", "latency"]),
            default="throughput",
            show_default=True,
            help="Most minibatches per second, or least time per batch of --microbatches.",
        ),
        click.Option(
            ["--straight"],
            is_flag=True,
            help="No replication: one device per stage.  [default: off]",
        ),
        click.Option(
            ["--fewer-machines"],
            is_flag=True,
            help="Leave machines unused where that is faster.  [default: use all]",
        ),
        click.Option(
            ["--epsilon"],
            type=FiniteRange(min=0),
            metavar="SECONDS",
            help="For latency: accept a plan slower by this many seconds per microbatch, to plan"
            " faster.  [default: 0]",
        ),
        click.Option(
            ["--layers"],
            type=click.IntRange(min=1),
            metavar="L",
            help="For latency: group the graph into L layers and cut only between them."
            "  [default: cut anywhere]",
        ),
    ),
    "Schedule and memory": (
        click.Option(
            ["--schedule"],
            type=click.Choice(SCHEDULES),
            help="Order of passes and updates.  [default: weight-stashing; flush with --objective"
            " latency]",
        ),
        click.Option(
            ["--microbatches"],
            type=click.IntRange(min=1),
            metavar="B",
            help="Minibatches of GRAPH in a batch (latency) or an update (flush, gpipe, 2bw)."
            "  [default: 4]  With --compare: of the plans with a flush.  [default: 4 per device]",
        ),
        click.Option(
            ["--global-batch"],
            type=click.IntRange(min=1),
            metavar="N",
            help="If GRAPH is a folder: examples per update; tries each batch size that divides N,"
            " with N / size microbatches.  [default: --microbatches of each size]",
        ),
        click.Option(
            ["--memory"],
            metavar="BYTES",
            help="Bytes of each device, such as 16GB.  [default: unlimited]",
        ),
        click.Option(
            ["--optimizer"],
            type=click.Choice(["sgd", "momentum", "adam"]),
            default="adam",
            show_default=True,
            help="Optimizer whose state is counted: none, one or two tensors per parameter.",
        ),
        click.Option(
            ["--weight-prediction"],
            is_flag=True,
            help="Count the memory of weight prediction, as in run configs with asynchronous:"
            " weight_prediction.  [default: off]",
        ),
        click.Option(
            ["--recompute"],
            type=click.Choice(["never", "auto", "always"]),
            default="auto",
            show_default=True,
            help="Recompute a stage's forward pass before its backward pass; auto: only in stages"
            " that --memory would not hold otherwise.",
        ),
        click.Option(
            ["--in-flight"],
            type=click.Choice(["useful", "least"]),
            default="useful",
            show_default=True,
            help="Minibatches between forward and backward: as many as keep the pace and fit, or"
            " PipeDream's number, with less memory and fresher weights.",
        ),
    ),
    "Output": (
        click.Option(
            ["-o", "--output"],
            type=click.Path(path_type=Path, file_okay=False),
            help="Folder for plan.json, graph.txt and graph.svg.  [default: GRAPH's folder/plan]",
        ),
        click.Option(
            ["--export", "exports"],
            type=click.Choice(["torch", "torchtitan", "deepspeed", "megatron"]),
            multiple=True,
            help="Also write the plan for another framework; repeat for more.  [default: none]",
        ),
        click.Option(
            ["--timeline"],
            is_flag=True,
            help="Draw the simulated schedule: timeline.png, timeline.json (Perfetto), memory.png."
            "  [default: off]",
        ),
        click.Option(
            ["--compare"],
            is_flag=True,
            help="Compare with five other plans, each simulated: a table, compare.csv, compare.png."
            "  [default: off]",
        ),
        click.Option(
            ["--sweep"],
            metavar="FIRST..LAST",
            help="Also plan for these numbers of workers, such as 1..64, filling the machines of"
            " --machines: a table, sweep.csv, sweep.png.  [default: none]",
        ),
    ),
}


PARAMETERS: list[click.Parameter] = [
    click.Argument(["graph"], type=_PATH),
    *(option for options in _OPTIONS.values() for option in options),
]
GROUPS = {
    heading: tuple(option.name or "" for option in options) for heading, options in _OPTIONS.items()
}
"""The Python names of the options under each heading of --help."""
