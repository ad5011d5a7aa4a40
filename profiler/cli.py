"""`pd-profile`: measures what each layer of a model costs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipedream.graph.command import Command
from pipedream.graph.errors import UserError
from pipedream.profiler.network.options import (
    NETWORK_OPTIONS,
    check_no_network_options,
    with_network_options,
)
from pipedream.profiler.report.batch_sizes import check_folder, parse_batch_sizes, profile_sizes
from pipedream.profiler.report.view import VIEW_OPTIONS, viewed, with_view_options

if TYPE_CHECKING:
    import torch

    from pipedream.capture.sources.load import Loaded
    from pipedream.graph.model import Graph
    from pipedream.graph.profile import Profile

_BATCH_SIZE = 32


@click.command(
    "pd-profile",
    cls=Command,
    groups={"Looking at profiles": VIEW_OPTIONS, "The network": NETWORK_OPTIONS},
)
@click.argument("model", metavar="[MODEL]", required=False)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Folder for what is measured; needed but with --show and --diff.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help=f"Examples in a minibatch.  [default: the run config's, else {_BATCH_SIZE}]",
)
@click.option(
    "--batch-sizes",
    metavar="N,N,...",
    help="Profile at each of these, as 1,2,4,8, into folders of their own, for pd-optimize to"
    " choose from: a table, batch_sizes.csv, batch_sizes.png.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1.")
@click.option(
    "--warmup",
    type=click.IntRange(min=1),
    help="Passes before the first that counts.  [default: until they get no faster]",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    help="Passes to take the median of.  [default: until it is known within 1%]",
)
@click.option(
    "--seconds",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0.0),
    help="Without --repeats, for so long at most.",
)
@click.option(
    "--arg",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Argument for the model's factory, say num_classes=10; may be repeated.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="SHAPE[:DTYPE[:BOUND]]",
    help="An example input without the batch: 3x32x32 or 128:int64:50257; repeat for more.",
)
@click.option(
    "--threads",
    default=1,
    show_default=True,
    type=click.IntRange(min=1, max=os.cpu_count()),
    help="CPU threads of one operator; a worker of pd-train uses 1.",
)
@click.option(
    "--workers",
    default=1,
    show_default=True,
    type=click.IntRange(min=1, max=os.cpu_count()),
    help="Processes that do passes of the model at once: as many workers as a machine is to have.",
)
@click.option(
    "--meta",
    is_flag=True,
    help="For a model that does not fit in memory: give it to one node at a time.",
)
@with_network_options
@with_view_options
def main(
    model: str | None,
    output: Path | None,
    batch_size: int | None,
    batch_sizes: str | None,
    device: str,
    warmup: int | None,
    repeats: int | None,
    seconds: float,
    arguments: tuple[str, ...],
    inputs: tuple[str, ...],
    threads: int,
    workers: int,
    meta: bool,
    network: bool,
    sort: str,
    top: int | None,
    **_: Any,
) -> int:
    """Measures MODEL: torchvision:NAME, timm:NAME, transformers:NAME, package.module:factory or a
    run config.

    Writes graph.txt (forward and backward time, sizes of each layer) for pd-optimize, profile.json
    with all that was measured, layers.csv with a row for each layer, and the pictures layers.png
    and graph.svg. --show and --diff look at such profiles again.

    With --network it measures the network in place of a model, as one of several ranks: torchrun
    --standalone --nproc-per-node=2 --no-python pd-profile --network -o runs/network
    """
    context = click.get_current_context()
    if viewed(context):
        return 0
    if not network:
        check_no_network_options(context.params)
        if model is None:
            raise UserError(
                "MODEL is missing: say what to measure, or --network, or look at profiles with"
                " --show or --diff"
            )
    if output is None:
        raise UserError("-o is missing: name a folder for what is measured, say -o profile")
    if network:
        return _measure_network(context.params)
    assert model is not None
    sizes = None if batch_sizes is None else parse_batch_sizes(batch_sizes)
    if sizes is not None and batch_size is not None:
        raise UserError("--batch-size and --batch-sizes both say how many examples: give one")
    args = dict(_argument(text) for text in arguments)
    _make_folder(output)
    if sizes is not None:
        check_folder(output, sizes)

    import torch

    from pipedream.profiler.measure import Settings, measure
    from pipedream.profiler.timing.statistics import StoppingRule

    where, stopping_rule = _device(device), StoppingRule(warmup, repeats, seconds)

    def measured(asked: int | None) -> tuple[Graph, Profile]:
        torch.manual_seed(0)
        with _enough_memory(device), _progress() as step:
            step("loading", 0.0, 0.0)
            loaded, known, size = _load(model, dict(args), asked, inputs, meta)
            step("capturing", 0.0, 0.0)
            settings = Settings(model, known, size, where, stopping_rule, threads, meta, workers)
            return measure(loaded, settings, lambda part: step("timing", part, 1.0))

    if sizes is not None:
        profile_sizes(sizes, output, measured, _write)
    else:
        _profile_one(*measured(batch_size), output, sort, top)
    planned = output if sizes is not None else output / "graph.txt"
    click.echo(f"Next: pd-optimize {planned} --machines 2 --bandwidth 1GB")
    return 0


def _profile_one(graph: Graph, profile: Profile, output: Path, sort: str, top: int | None) -> None:
    from pipedream.profiler.report.summary import print_report

    written = _write(graph, profile, output)
    print_report(profile, sort, top)
    click.echo(f"Written: {written}")


def _measure_network(parameters: Mapping[str, Any]) -> int:
    """One rank's part; the exit code. An error that all ranks have is told once."""
    # Else torch adds C++ traces of its own to the line that says that a rank was lost.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from pipedream.comm.launcher import environment, speaks
    from pipedream.profiler.network.options import asked

    try:
        place = environment()
        options = asked(parameters, place)
        assert place is not None
        if place.rank == 0:
            _make_folder(options.output)

        from pipedream.profiler.network.command import measure_network

        with _enough_memory(options.device, "--largest"), _progress() as step:
            measure_network(options, place, lambda what: step(what, 0.0, 0.0))
    except (UserError, OSError):
        if speaks():
            raise
        return UserError.exit_code
    return 0


def _argument(text: str) -> tuple[str, Any]:
    """`hidden=[64, 64]` as a name and a YAML value."""
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"--arg {text}: write NAME=VALUE, say --arg num_classes=10")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"--arg {text}: {value!r} is no value; a list is [1, 2]") from error


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UserError(f"-o {output}: this is a file, not a folder") from error
    except OSError as error:
        raise UserError(f"-o {output}: cannot be made: {error.strerror}") from error


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
        raise UserError(f"--device {text}: there are {torch.cuda.device_count()} GPUs, from cuda:0")
    return device


def _load(
    model: str,
    args: dict[str, Any],
    batch_size: int | None,
    inputs: tuple[str, ...],
    meta: bool,
) -> tuple[Loaded, dict[str, Any], int]:
    """The model, its factory's arguments and its batch size."""
    from pipedream.capture.sources.load import load, load_config
    from pipedream.graph.run_config import read_config

    if not model.endswith((".yaml", ".yml")):
        if ":" not in model:
            raise UserError(
                f"MODEL {model!r}: write torchvision:NAME, timm:NAME, transformers:NAME, "
                "package.module:factory or a run config's CONFIG.yaml"
            )
        size = batch_size or _BATCH_SIZE
        return load(model, args, size, inputs, meta), args, size
    for option, given in (("--arg", args), ("--input", inputs)):
        if given:
            raise UserError(f"{option} does not go with a run config: {model} says what to use")
    path = Path(model)
    config = read_config(path)
    size = batch_size or config.batch_size
    return load_config(config, path.parent, size, meta), dict(config.model.args), size


@contextmanager
def _enough_memory(device: str, option: str = "--batch-size") -> Iterator[None]:
    """Running out of memory is the user's to mend, wherever it happens."""
    try:
        yield
    except RuntimeError as error:
        from pipedream.profiler.free_memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        raise UserError(f"out of memory on {device}: choose a smaller {option}") from error


@contextmanager
def _progress() -> Iterator[Callable[[str, float, float], None]]:
    """A bar on stderr where that is a terminal; call it with what is done, how far, and of what."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(
        console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total or None
        )


def _write(graph: Graph, profile: Profile, output: Path) -> str:
    """Writes all files; a line that names them."""
    from pipedream.graph.draw import draw, why_text
    from pipedream.graph.model import format_graph
    from pipedream.graph.profile import write_profile
    from pipedream.profiler.report.layers import layers_frame, write_layers
    from pipedream.profiler.report.layers_picture import draw_layers

    try:
        output.mkdir(exist_ok=True)
        (output / "graph.txt").write_text(format_graph(graph), encoding="utf-8")
        write_profile(profile, output / "profile.json")
        write_layers(layers_frame(profile), output / "layers.csv")
        draw_layers(profile, output / "layers.png")
        picture = draw(graph, output / "graph", f"{profile.model}, batch {profile.batch_size}")
    except OSError as error:
        raise UserError(f"-o {output}: cannot be written: {error.strerror}") from error
    why = why_text(graph, picture)
    files = f"{output}/graph.txt, profile.json, layers.csv, layers.png, {picture.name}"
    return files + (f" ({why})" if why else "")


if __name__ == "__main__":
    main()
