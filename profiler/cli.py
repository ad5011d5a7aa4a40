"""`pd-profile`: measures the time and memory that each layer of a model takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipedream.graph.command import COUNT, PATH, Command, UserError, option, write_whole, writing
from pipedream.profiler.collecting import without_collecting
from pipedream.profiler.network.options import NETWORK_OPTIONS, check_no_network_options
from pipedream.profiler.progress import progress
from pipedream.profiler.report.view import VIEW_OPTIONS, view_profiles

if TYPE_CHECKING:
    import torch

    from pipedream.capture.sources.load import Loaded
    from pipedream.profiler.assembly import Measured

_BATCH_SIZE = 32
_CORES = click.IntRange(min=1, max=os.cpu_count())
_GROUPS = {
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
            f"Examples in a minibatch.  [default: the run config's, else {_BATCH_SIZE}]",
            COUNT,
        ),
        option(
            "--batch-sizes N,N,...",
            "Profile at each of these batch sizes, such as 1,2,4,8: a folder for each, and a"
            " comparison. pd-optimize then chooses one.  [default: one batch size]",
        ),
        option(
            "--meta",
            "For a model larger than memory: create it without data and measure one node at a"
            " time.  [default: measure whole passes]",
        ),
        option(
            "--dtype TYPE",
            "Of parameters and inputs.  [default: the run config's, else float32]",
            click.Choice(["float32", "float64", "bfloat16"]),
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
            " them: 2,4,8; with none they are taken to divide evenly.  [default: 2, of those that"
            " take most of the time]",
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
_EXAMPLES = (
    "pd-profile torchvision:resnet50 --batch-size 64 -o profiles/resnet50",
    "torchrun --standalone --nproc-per-node=2 --no-python \\\n"
    "  pd-profile --network -o runs/network",
)


@click.command("pd-profile", cls=Command, groups=_GROUPS, examples=_EXAMPLES)
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
    """Measures at one batch size or at several, then prints and writes the results."""
    from pipedream.profiler.report.batch_sizes import check_folder, parse_batch_sizes, profile_sizes
    from pipedream.profiler.report.summary import print_report

    planned = output = options["output"]
    sizes = None if options["batch_sizes"] is None else parse_batch_sizes(options["batch_sizes"])
    if sizes is not None and options["batch_size"] is not None:
        raise UserError("--batch-size and --batch-sizes both set the number of examples: give one")
    args = dict(map(_argument, options["arguments"]))
    _make_folder(output)
    if sizes is not None:
        check_folder(output, sizes)
        profile_sizes(sizes, output, _measurement(options, args), write_files)
    else:
        # What is measured is measured as it is trained: with whatever Python does beside it.
        estimated = options["asked_device"] is not None
        with without_collecting() if estimated else nullcontext():
            measured = _measurement(options, args)(options["batch_size"])
            planned = output / "graph.txt"
            written = write_files(measured, output)
        print_report(measured.profile, options["sort"], options["top"])
        if measured.undivided:
            click.echo(f"Not divisible: {measured.undivided}")
        click.echo(f"Written: {written}")
    click.echo(f"Next: pd-optimize {planned} --machines 2 --bandwidth 1GB")


def _measurement(
    options: Mapping[str, Any], args: Mapping[str, Any]
) -> Callable[[int | None], Measured]:
    """Returns what measures the model at a batch size, or at the model's own for None."""
    import torch

    from pipedream.profiler.assembly import Settings
    from pipedream.profiler.measure import measure
    from pipedream.profiler.timing.stopping_rule import StoppingRule

    if options["asked_device"] is not None:
        return _estimation(options, args)
    shards = None if options["shards"] is None else _shards(options["shards"])
    model, meta, device = options["model"], options["meta"], _device(options["device"])
    rule = StoppingRule(options["warmup"], options["repeats"], options["seconds"])

    def measure_at(batch_size: int | None) -> Measured:
        torch.manual_seed(0)
        with _enough_memory(options["device"]), progress() as step:
            step("loading", 0.0, 0.0)
            loaded, used, size = _load(
                *(model, dict(args), batch_size, options["inputs"], meta, options["dtype"])
            )
            step("capturing", 0.0, 0.0)
            threads, workers = options["threads"], options["workers"]
            backend = _backend(options["compile"], loaded.compile)
            settings = Settings(
                *(model, used, size, device, rule, threads, meta, workers, shards, backend)
            )
            return measure(loaded, settings, lambda part: step("timing", part, 1.0))

    return measure_at


def _estimation(
    options: Mapping[str, Any], args: Mapping[str, Any]
) -> Callable[[int | None], Measured]:
    """Returns what estimates the model at a batch size, on the device of --for."""
    import torch

    from pipedream.profiler.assembly import Settings
    from pipedream.profiler.estimate.device_file import read_device
    from pipedream.profiler.estimate.estimate import estimate
    from pipedream.profiler.timing.stopping_rule import StoppingRule

    for name in ("device", "threads", "workers", "compile", "warmup", "repeats"):
        source = click.get_current_context().get_parameter_source(name)
        if source is not click.core.ParameterSource.DEFAULT:
            raise UserError(f"--{name} is for measuring: it does not go with --for")
    device = read_device(options["asked_device"])
    shards = None if options["shards"] is None else _shards(options["shards"])

    def estimate_at(batch_size: int | None) -> Measured:
        with progress() as step:
            step("loading", 0.0, 0.0)
            loaded, used, size = _load(
                *(options["model"], dict(args), batch_size, options["inputs"], True),
                options["dtype"],
            )
            settings = Settings(
                *(options["model"], used, size, torch.device("cpu"), StoppingRule(), 1, True),
                shards=shards,
            )
            return estimate(loaded, settings, device, lambda what: step(what, 0.0, 0.0))

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
            loaded = _load_beside(parameters)
            measure_network(options, rank_info, lambda what: step(what, 0.0, 0.0), loaded)
    except (UserError, OSError):
        let_rank_0_speak()
        raise
    return 0


def _load_beside(parameters: Mapping[str, Any]) -> Loaded | None:
    """Returns the model beside whose passes to measure sums, if one is named."""
    import torch

    if parameters["model"] is None:
        return None
    torch.manual_seed(0)
    args = dict(map(_argument, parameters["arguments"]))
    size, inputs = parameters["batch_size"], parameters["inputs"]
    return _load(parameters["model"], args, size, inputs, meta=False)[0]


def _argument(text: str) -> tuple[str, Any]:
    """Reads `hidden=[64, 64]` as a name and a YAML value."""
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"--arg {text}: write NAME=VALUE, such as --arg num_classes=10")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(
            f"--arg {text}: {value!r} is not a YAML value; write a list as [1, 2]"
        ) from error


def _shards(text: str) -> tuple[int, ...]:
    """Reads `2,4,8`, or `none`. Raises UserError."""
    if text == "none":
        return ()
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--shards {text}: give numbers of devices, as 2,4,8, or none") from None
    if min(counts) < 2:
        raise UserError(f"--shards {text}: {min(counts)} is no division: give 2 or more")
    return tuple(sorted(set(counts)))


def _backend(asked: str | None, own: str | None) -> str | None:
    """Returns torch.compile's backend, None for none. Raises UserError."""
    from pipedream.capture.compiled import check_backend
    from pipedream.graph.run_config import AUTO, backend_of

    backend = own if asked is None else backend_of(asked)
    if backend not in (None, AUTO):
        check_backend(backend, "compile" if asked is None else f"--compile {asked}")
    return backend


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


def _load(
    model: str,
    args: dict[str, Any],
    batch_size: int | None,
    inputs: tuple[str, ...],
    meta: bool,
    dtype: str | None = None,
) -> tuple[Loaded, dict[str, Any], int]:
    """Returns the model with its inputs, the arguments of its factory, and its batch size."""
    from pipedream.capture.sources.load import in_dtype, load, load_config
    from pipedream.graph.errors import check_kind, read_text
    from pipedream.graph.run_config import read_config

    if not model.endswith((".yaml", ".yml")):
        if Path(model).is_file():
            check_kind(Path(model), read_text(Path(model)), "model")
        if ":" not in model:
            raise UserError(
                f"MODEL {model!r}: write torchvision:NAME, timm:NAME, transformers:NAME, "
                "package.module:factory, or the path of a run config, CONFIG.yaml"
            )
        size = batch_size or _BATCH_SIZE
        return in_dtype(load(model, args, size, inputs, meta), dtype or "float32"), args, size
    for name, values in (("--arg", args), ("--input", inputs)):
        if values:
            raise UserError(f"{name} does not go with a run config: set it in {model}")
    path = Path(model)
    config = read_config(path)
    if dtype is not None:
        config = config.model_copy(update={"dtype": dtype})
    size = batch_size or config.batch_size
    return load_config(config, path.parent, size, meta), dict(config.model.args), size


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


def write_files(measured: Measured, output: Path) -> str:
    """Writes all files of a profile; returns a line that names them."""
    from pipedream.graph.draw import draw, why_text
    from pipedream.graph.model import format_graph
    from pipedream.graph.placements.operators import write_operators
    from pipedream.graph.profile import write_profile
    from pipedream.profiler.report.layers import layers_frame
    from pipedream.profiler.report.layers_picture import draw_layers

    graph, profile, operators = measured.graph, measured.profile, measured.operators
    with writing(output):
        output.mkdir(exist_ok=True)
        write_whole(output / "graph.txt", format_graph(graph))
        write_profile(profile, output / "profile.json")
        if operators is None:
            (output / "operators.json").unlink(missing_ok=True)  # of an earlier run
        else:
            write_operators(operators, output / "operators.json")
        write_whole(output / "layers.csv", layers_frame(profile).to_csv(index=False))
        draw_layers(profile, output / "layers.png")
        picture = draw(graph, output / "graph", profile.title, profile.modules)
    why = why_text(graph, picture)
    traced = ["operators.json"] if operators is not None else []
    names = [f"{output}/graph.txt", "profile.json", *traced, "layers.csv", "layers.png"]
    files = ", ".join([*names, picture.name]) + (f" ({why})" if why else "")
    return files if traced else f"{files}; no operators.json: {profile.no_operators}"


if __name__ == "__main__":
    main()
