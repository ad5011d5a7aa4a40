"""The options of `pd-optimize` as click knows them, under the headings of --help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipedream.graph import command
from pipedream.graph.command import PATH, FiniteRange
from pipedream.optimizer.cli.options import OptionType, option_types

EXAMPLES = (
    "pd-optimize profiles/vgg16/graph.txt --machines 4,2 --bandwidth 10GB,1GB --memory 16GB",
    "pd-optimize graph.txt --cluster cluster.yaml --objective latency --microbatches 8",
)


def option(declaration: str, text: str, kind: click.ParamType[Any] | None = None) -> click.Option:
    """An option of the type and with the default that `Options` says; `kind` overrides the type."""
    name = declaration.split("--")[1].split()[0].replace("-", "_")
    known = option_types()[name]
    settings: dict[str, Any] = {"multiple": True} if known.several else {}
    if known.of is not bool and known.default not in (None, ()):
        settings["default"] = known.default
    return command.option(declaration, text, kind or _kind(known), **settings)


def _kind(known: OptionType) -> click.ParamType[Any] | None:
    """Returns the type that click has for it; None for words and flags."""
    if known.choice is not None:
        return click.Choice(known.choice)
    if known.of is Path:
        return PATH
    if known.bounds is None:
        return None
    least, most, above = known.bounds.least, known.bounds.most, known.bounds.above
    if known.of is int:
        return click.IntRange(int(least), None if most is None else int(most))
    return FiniteRange(min=least, min_open=above)


GROUPS = {
    "Cluster": (
        option(
            "--cluster FILE",
            "Cluster file: levels, measured links, types of device. Or so many machines of eight"
            " devices: dgx-a100:4, dgx-h100:4, dgx-h200:4, dgx-b200:4, l40s:4, mi300x:4. Or auto:"
            " the workers of this machine, with the network between them measured first. Instead of"
            " --machines, --bandwidth and --latency.  [default: none]",
        ),
        option(
            "--machines N,N,...",
            "Devices per machine, number of machines, and so on for outer levels: 4,2 is 2 machines"
            " of 4 devices.  [required without --cluster, --like or --calibrate]",
        ),
        option(
            "--bandwidth B,B,...",
            "Bytes per second of each level, innermost first: 10GB,1GB. Units: B, GB, GiB, Gbit and"
            " so on; a number without a unit is bytes per second.  [required with --machines]",
        ),
        option(
            "--latency T,T,...",
            "Seconds of a message at each level, innermost first: 5us,50us.  [default: 0]",
        ),
        option(
            "--speed X",
            "How many times as fast as the device that was profiled the devices are, for plans"
            " for machines that you do not have; a cluster file has it for each type.  [default:"
            " 1]",
        ),
        option(
            "--like PLAN",
            "Take the cluster of this plan.json, and its options as defaults.  [default: none]",
        ),
        option(
            "--workers N",
            "With --like or --calibrate: plan for N devices of that cluster; with --cluster auto:"
            " for N here.  [default: all]",
        ),
    ),
    "Model of cost": (
        option(
            "--profile",
            "profile.json with the memory and modules of the layers.  [default: profile.json"
            " beside GRAPH, if there]",
        ),
        option(
            "--again PROFILE",
            "A further profile.json of the same model on the same machine, such as of another time"
            " of day: times are the mean, and the interval of the expected time is as wide as they"
            " differ. Repeat for more.  [default: none]",
        ),
        option(
            "--cost-model",
            "How plans are judged: by the simulator (network), or by a formula: PipeDream's as"
            " published (paper) or as released, or one for measured links.  [default: network]",
        ),
        option(
            "--activation-compression R",
            "For paper, released and measured: divide the bytes between stages by R; released"
            " counts them only with this option.  [default: no compression]",
        ),
        option(
            "--update-rate BYTES",
            "Bytes of parameters that the optimizer updates per second.  [default: the profile's;"
            " else 50GB, or 10GB of muon, in the simulation only]",
        ),
        option(
            "--calibrate RUN",
            "Correct the times of GRAPH by what pd-train measured in this run folder, and say"
            " whether another plan is better now. Takes the cluster and options of the run's plan"
            " as defaults. Repeat for more runs, newest last.  [default: none]",
        ),
    ),
    "Plan": (
        option(
            "--objective",
            "Most minibatches per second, or least time per batch of --microbatches.",
        ),
        option("--straight", "No replication: one device per stage.  [default: off]"),
        option(
            "--group",
            "Keep operators together: fusion puts what is elementwise, or reduces rows, with the"
            " product or convolution before it; module keeps the blocks of a model whole. There are"
            " fewer cuts to search; none cuts between any two.",
        ),
        option(
            "--fewer-machines",
            "For paper, released and measured: leave machines unused where that is faster, as"
            " network always may.  [default: use all]",
        ),
        option(
            "--epsilon SECONDS",
            "For latency: accept a plan slower by this many seconds per microbatch, to plan"
            " faster.  [default: 0]",
        ),
        option(
            "--layers L",
            "For latency: group the graph into L layers and cut only between them.  [default: cut"
            " anywhere]",
        ),
        option(
            "--split NAME,NAME,...",
            "Price your own stages: each but the first begins with this node, or with the first"
            " node of this module, and has all up to the next. One device for each, or --replicas."
            "  [default: the fastest]",
        ),
        option(
            "--replicas N,N,...",
            "With --split: the devices of each stage. One number alone: of the whole model."
            "  [default: 1]",
        ),
    ),
    "Schedule and memory": (
        option(
            "--schedule",
            "When weights are updated, and which version a minibatch uses.  [default:"
            " weight-stashing; flush with --objective latency]",
        ),
        option(
            "--order",
            "In which order a rank does its passes: of several stages with interleaved, zb-v,"
            " v-half, v-min and auto; backward passes in halves with all but interleaved; auto is"
            " found for the measured times; best is the fastest. With a flush.  [default: 1f1b]",
        ),
        option(
            "--stages-per-rank V",
            "With --order: so many stages on each rank, 1 to 4.  [default: what is fastest]",
        ),
        option(
            "--microbatches B",
            "Minibatches of GRAPH in a batch (latency) or an update (flush, gpipe, 2bw)."
            "  [default: 4]  With --compare: of the plans with a flush.  [default: 4 per device]",
        ),
        option(
            "--global-batch N",
            "Examples per update, in N / batch size microbatches, with a flush unless --schedule"
            " says otherwise. If GRAPH is a folder, each batch size in it that divides N is tried;"
            " the order of passes is chosen as well.  [default: --microbatches of each size]",
        ),
        option(
            "--sequence T",
            "Tokens of an example: of the profiles in GRAPH those that pd-profile --sequence made"
            " for so many.  [default: those that are there]",
        ),
        option("--memory BYTES", "Bytes of each device, such as 16GB.  [default: unlimited]"),
        option(
            "--room BYTES",
            "Bytes of each device that are not the model's, but CUDA's and NCCL's, or Python's and"
            " torch's.  [default: 2GB with the profile of a GPU, else as profiled]",
        ),
        option(
            "--optimizer",
            "Optimizer whose state and updates are counted: none, one or two tensors per parameter;"
            " with muon one for a weight of a hidden layer, and AdamW's two for all others.",
        ),
        option(
            "--weight-prediction",
            "Count the memory of weight prediction, as in run configs with asynchronous:"
            " weight_prediction.  [default: off]",
        ),
        option(
            "--error-feedback",
            "Count the memory of steps that are made good, as in run configs with asynchronous:"
            " error_feedback.  [default: off]",
        ),
        option(
            "--basis-rotation",
            "Count the memory of rotated bases, as in run configs with asynchronous:"
            " basis_rotation.  [default: off]",
        ),
        option(
            "--recompute",
            "Recompute forward passes for backward passes; auto: in stages that --memory would not"
            " hold otherwise, single nodes where that is enough; whole: there, whole stages.",
        ),
        option(
            "--host-bandwidth BYTES",
            "Bytes per second between a device and its host, each way: stages that --memory would"
            " not hold may then keep activations there; 0: none may.  [default: that of the device"
            " file with an estimated profile, else 0]",
        ),
        option(
            "--zero",
            "Divide the optimizer's state among the replicas of a stage (ZeRO-1); auto: only in"
            " stages that --memory would not hold otherwise.",
        ),
        option(
            "--in-flight",
            "Minibatches between forward and backward: as many as keep the pace and fit, or"
            " PipeDream's number, with less memory and fresher weights.",
        ),
    ),
    "Stages on several devices": (
        option(
            "--mesh N,N,...",
            "Make each worker a team of N x N x ... devices that share the operators of its stage."
            " Needs operators.json beside GRAPH.  [default: the best]",
        ),
        option(
            "--shard PATTERN=PLACEMENTS",
            "With --mesh: place the parameters of this name (* stands for any letters), one"
            " placement for each axis: S(0) shards dimension 0, S(0, chunks=3) each third of it, R"
            " replicates. The rest follows. Repeat for more.  [default: all R]",
        ),
        option(
            "--intra-op",
            "How to divide operators among devices: exact finds the best for each mesh and proves"
            " it, cones nearly so, with fewer choices, propagate divides what --shard leads to,"
            " recursive halves the machine again and again, in milliseconds; none: each worker is"
            " one device. auto: exact, on every mesh that the machines have, where that may be"
            " faster than none by 4 %.",
        ),
    ),
    "Output": (
        option(
            "-o --output",
            "Folder for plan.json, graph.txt and graph.svg.  [default: GRAPH's folder/plan]",
            click.Path(path_type=Path, file_okay=False),
        ),
        option(
            "--export",
            "Also write the plan for another framework; repeat for more.  [default: none]",
        ),
        option(
            "--timeline",
            "Draw the simulated schedule: timeline.png, timeline.json (Perfetto), memory.png."
            "  [default: off]",
        ),
        option(
            "--compare",
            "Compare with six other plans, each simulated: a table, compare.csv, compare.png."
            "  [default: off]",
        ),
        option(
            "--sweep FIRST..LAST",
            "Also plan for these numbers of workers, such as 1..64, filling the machines of"
            " --machines: a table, sweep.csv, sweep.png.  [default: none]",
        ),
    ),
}
