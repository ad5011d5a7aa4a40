"""`pd-profile`: measures the time and memory that each layer of a model takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipedream.graph.command import Command, UserError
from pipedream.profiler.arguments import EXAMPLES, GROUPS
from pipedream.profiler.collecting import without_collecting
from pipedream.profiler.loading import (
    backend_asked,
    load_beside,
    load_model,
    parse_argument,
    parse_sequences,
    parse_shards,
)
from pipedream.profiler.network.options import check_no_network_options
from pipedream.profiler.progress import progress
from pipedream.profiler.report.files import write_files
from pipedream.profiler.report.view import view_profiles

if TYPE_CHECKING:
    import torch

    from pipedream.profiler.assembly import Measured


@click.command("pd-profile", cls=Command, groups=GROUPS, examples=EXAMPLES)
@click.argument("model", metavar="[MODEL]", required=False)
def main(**parameters: Any) -> int:
    """Measure the time and memory of each layer of MODEL: torchvision:NAME, timm:NAME,
    transformers:NAME, package.module:factory, or the path of a run config.

    Writes graph.txt, which pd-optimize reads, profile.json with all measurements, operators.json
    with the operators of each layer, layers.csv with one row per layer, and the pictures layers.png
    and graph.svg.

    With --network it measures the network between ranks instead, sums of gradients beside passes of
    MODEL if one is named.
    """
    context = click.get_current_context()
    if view_profiles(context):
        return 0
    if not parameters["network"]:
        check_no_network_options(parameters)
        if parameters["model"] is None:
            raise UserError(
                "MODEL is missing: name what to measure, or use --network, or look at profiles with"
                " --show or --diff"
            )
    if parameters["output"] is None:
        raise UserError("-o is missing: name a folder for the results, such as -o profile")
    if parameters["network"]:
        return _measure_network(parameters)
    _profile_model(parameters)
    return 0


def _profile_model(options: Mapping[str, Any]) -> None:
    """Measures at each sequence length that was asked for."""
    from pipedream.graph.profile import sequence_folder

    lengths = () if options["sequence"] is None else parse_sequences(options["sequence"])
    output = options["output"]
    if len(lengths) < 2:
        planned = str(_profile_at(options, next(iter(lengths), None), output))
    else:
        for length in lengths:
            _profile_at(options, length, sequence_folder(output, length))
        planned = f"{output} --sequence {lengths[0]}"
    click.echo(f"Next: pd-optimize {planned} --machines 2 --bandwidth 1GB")


def _profile_at(options: Mapping[str, Any], sequence: int | None, output: Path) -> Path:
    """Measures at one batch size or at several, then prints and writes the results. Returns what to
    plan.
    """
    from pipedream.profiler.report.batch_sizes import check_folder, parse_batch_sizes, profile_sizes
    from pipedream.profiler.report.summary import print_report

    sizes = None if options["batch_sizes"] is None else parse_batch_sizes(options["batch_sizes"])
    if sizes is not None and options["batch_size"] is not None:
        raise UserError("--batch-size and --batch-sizes both set the number of examples: give one")
    args = dict(map(parse_argument, options["arguments"]))
    _make_folder(output)
    measure_at = _measurement(options, args, sequence)
    if sizes is not None:
        check_folder(output, sizes)
        profile_sizes(sizes, output, measure_at, write_files)
        return output
    # What is measured is measured as it is trained: with whatever Python does beside it.
    estimated = options["asked_device"] is not None
    with without_collecting() if estimated else nullcontext():
        measured = measure_at(options["batch_size"])
        written = write_files(measured, output)
        print_report(measured.profile, options["sort"], options["top"])
    if measured.undivided:
        click.echo(f"Not divisible: {measured.undivided}")
    click.echo(f"Written: {written}")
    return output / "graph.txt"


def _measurement(
    options: Mapping[str, Any], args: Mapping[str, Any], sequence: int | None
) -> Callable[[int | None], Measured]:
    """Returns what measures the model at a batch size, or at the model's own for None."""
    import torch

    from pipedream.profiler.assembly import Settings
    from pipedream.profiler.measure import measure
    from pipedream.profiler.timing.stopping_rule import StoppingRule

    if options["asked_device"] is not None:
        return _estimation(options, args, sequence)
    if options["dtype"] == "fp8":
        raise UserError("--dtype fp8 is a what-if for a device that is not at hand: add --for h100")
    shards = None if options["shards"] is None else parse_shards(options["shards"])
    model, meta, device = options["model"], options["meta"], _device(options["device"])
    rule = StoppingRule(options["warmup"], options["repeats"], options["seconds"])

    def measure_at(batch_size: int | None) -> Measured:
        torch.manual_seed(0)
        with _enough_memory(options["device"]), progress() as step:
            step("loading", 0.0, 0.0)
            loaded, used, size = load_model(
                *(model, dict(args), batch_size, options["inputs"], meta, options["dtype"]),
                sequence,
            )
            step("capturing", 0.0, 0.0)
            threads, workers = options["threads"], options["workers"]
            backend = backend_asked(options["compile"], loaded.compile)
            settings = Settings(
                *(model, used, size, device, rule, threads, meta, workers, shards, backend),
                sequence=sequence,
            )
            return measure(loaded, settings, lambda part: step("timing", part, 1.0))

    return measure_at


def _estimation(
    options: Mapping[str, Any], args: Mapping[str, Any], sequence: int | None
) -> Callable[[int | None], Measured]:
    """Returns what estimates the model at a batch size, on the device of --for."""
    import torch

    from pipedream.profiler.assembly import Settings
    from pipedream.profiler.estimate.device_file import read_device
    from pipedream.profiler.estimate.estimate import estimate
    from pipedream.profiler.estimate.work import FP8
    from pipedream.profiler.timing.stopping_rule import StoppingRule

    for name in ("device", "threads", "workers", "compile", "warmup", "repeats"):
        source = click.get_current_context().get_parameter_source(name)
        if source is not click.core.ParameterSource.DEFAULT:
            raise UserError(f"--{name} is for measuring: it does not go with --for")
    device, dtype = read_device(options["asked_device"]), options["dtype"]
    fp8 = dtype == "fp8"
    if fp8 and FP8 not in device.peak:
        raise UserError(
            f"--dtype fp8: {device.name} has no peak for {FP8} in its device file: name another"
            " device with --for, or give --dtype bfloat16"
        )
    shards = None if options["shards"] is None else parse_shards(options["shards"])

    def estimate_at(batch_size: int | None) -> Measured:
        with progress() as step:
            step("loading", 0.0, 0.0)
            loaded, used, size = load_model(
                *(options["model"], dict(args), batch_size, options["inputs"], True),
                *("bfloat16" if fp8 else dtype, sequence),
            )
            settings = Settings(
                *(options["model"], used, size, torch.device("cpu"), StoppingRule(), 1, True),
                shards=shards,
                sequence=sequence,
            )
            return estimate(loaded, settings, device, lambda what: step(what, 0.0, 0.0), fp8)

    return estimate_at


def _measure_network(parameters: Mapping[str, Any]) -> int:
    """Runs this rank's part; returns the exit code. An error that all ranks share is told once."""
    # Otherwise torch adds C++ traces to the line that says that a rank was lost.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from pipedream.comm.rank_info import environment, let_rank_0_speak
    from pipedream.profiler.network.options import network_options

    try:
        rank_info = environment()
        options = network_options(parameters, rank_info)
        assert rank_info is not None
        if rank_info.rank == 0:
            _make_folder(options.output)

        from pipedream.profiler.network.command import measure_network

        telling = progress() if rank_info.rank == 0 else nullcontext(lambda *_: None)
        lower = "--largest" if options.model is None else "--batch-size"
        with _enough_memory(options.device, lower), telling as step:
            loaded = load_beside(parameters)
            measure_network(options, rank_info, lambda what: step(what, 0.0, 0.0), loaded)
    except (UserError, OSError):
        let_rank_0_speak()
        raise
    return 0


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UserError(f"-o {output}: this is a file, not a folder") from error
    except OSError as error:
        raise UserError(f"-o {output}: cannot be created: {error.strerror}") from error


def _device(text: str) -> torch.device:
    import torch

    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {text}: write cpu, cuda or cuda:1")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"--device {text}: torch finds no CUDA GPU here; use --device cpu")
    if (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"--device {text}: there are {torch.cuda.device_count()} GPUs, counted from cuda:0"
        )
    return device


@contextmanager
def _enough_memory(device: str, option: str = "--batch-size") -> Iterator[None]:
    """Turns running out of memory into a UserError that names the option to lower."""
    try:
        yield
    except RuntimeError as error:
        from pipedream.profiler.device import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        raise UserError(f"out of memory on {device}: choose a smaller {option}") from error


if __name__ == "__main__":
    main()
