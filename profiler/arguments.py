"""The options of `pd-profile` as click knows them, under the headings of --help."""

from __future__ import annotations

import os

import click

from pipedream.graph.command import COUNT, PATH, option
from pipedream.profiler.loading import BATCH_SIZE
from pipedream.profiler.network.options import NETWORK_OPTIONS
from pipedream.profiler.report.view import VIEW_OPTIONS

_CORES = click.IntRange(min=1, max=os.cpu_count())
GROUPS = {
    "Model and inputs": (
        option(
            "--arg NAME=VALUE arguments",
            "Argument for the model's factory, such as num_classes=10; repeat for more.  [default:"
            " the factory's own]",
            multiple=True,
        ),
        option(
            "--input SHAPE[:DTYPE[:BOUND]] inputs",
            "An example input without the batch dimension: 3x32x32 or 128:int64:50257; repeat for"
            " more.  [default: the model's own]",
            multiple=True,
        ),
        option(
            "--batch-size N",
            f"Examples in a minibatch.  [default: the run config's, else {BATCH_SIZE}]",
            COUNT,
        ),
        option(
            "--batch-sizes N,N,...",
            "Profile at each of these batch sizes, such as 1,2,4,8: a folder for each, and a"
            " comparison. pd-optimize then chooses one.  [default: one batch size]",
        ),
        option(
            "--sequence T,T,...",
            "Tokens of an example of transformers:NAME, such as 4096, in place of --input; several:"
            " a folder for each, of which pd-optimize --sequence takes one.  [default: 128, or the"
            " model's positions if these are fewer]",
        ),
        option(
            "--meta",
            "For a model larger than memory: create it without data and measure one node at a"
            " time.  [default: measure whole passes]",
        ),
        option(
            "--dtype TYPE",
            "Of parameters and inputs. fp8, with --for: bfloat16, and what if products were"
            " computed in fp8.  [default: the run config's, else float32]",
            click.Choice(["float32", "float64", "bfloat16", "fp8"]),
        ),
    ),
    "Measuring": (
        option(
            "--for DEVICE asked_device",
            "Estimate for a device that is not at hand, from flops and bytes of operators: a100,"
            " b200, cpu, h100, h200, l40s, mi300x, or a device file that ends in .yaml. The model"
            " gets no memory.  [default: measure here]",
        ),
        option("--device DEVICE", "cpu, cuda or cuda:1.", default="cpu"),
        option(
            "--threads N",
            "CPU threads of one operator; a worker of pd-train uses 1.",
            _CORES,
            default=1,
        ),
        option(
            "--workers N",
            "Processes that run the model at the same time: as many as one machine will have"
            " workers.",
            _CORES,
            default=1,
        ),
        option(
            "--compile WAY",
            "Measure stages as torch.compile makes them: stage for all of one, groups for blocks of"
            " the model, equal ones once, auto for what is fastest, the name of a backend, or none."
            "  [default: the run config's compile, else none]",
        ),
        option(
            "--shards N,N,...",
            "Time what one of so many devices has of each operator, where they divide it among"
            " them: 2,4,8; or what each has in a plan.json, to plan anew from; with none operators"
            " are taken to divide evenly.  [default: halves of those that take most of the time;"
            " then, for half a minute, what else 2, 4 and 8 are likely to have]",
        ),
        option(
            "--warmup N",
            "Passes before the first one that counts.  [default: until they get no faster]",
            COUNT,
        ),
        option(
            "--repeats N",
            "Passes to take the median of.  [default: until it is known within 1%]",
            COUNT,
        ),
        option(
            "--seconds SECONDS",
            "Without --repeats, the most seconds to spend on them.",
            click.FloatRange(min=0.0),
            default=30.0,
        ),
    ),
    "Comparing and viewing": VIEW_OPTIONS,
    "Network": NETWORK_OPTIONS,
    "Output": (
        option(
            "-o --output",
            "Folder for the results, created if missing; with --diff, a CSV file.  [required"
            " unless --show or --diff is given]",
            PATH,
        ),
    ),
}
EXAMPLES = (
    "pd-profile torchvision:resnet50 --batch-size 64 -o profiles/resnet50",
    "torchrun --standalone --nproc-per-node=2 --no-python \\\n"
    "  pd-profile --network -o runs/network",
)
