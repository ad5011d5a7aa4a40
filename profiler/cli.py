"""`pd-profile`: measures what each layer of a model costs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipedream.graph.command import Command, UserError

if TYPE_CHECKING:
    import torch

    from pipedream.graph.model import Graph
    from pipedream.profiler.profile import Profile
    from pipedream.profiler.source import Loaded

_BATCH_SIZE = 32


@click.command("pd-profile", cls=Command)
@click.argument("model", metavar="MODEL")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for graph.txt, profile.json and graph.svg.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help=f"Examples in a minibatch.  [default: the run config's, else {_BATCH_SIZE}]",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:1.")
@click.option("--warmup", default=3, show_default=True, type=click.IntRange(min=0))
@click.option("--repeats", default=10, show_default=True, type=click.IntRange(min=1))
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
def main(
    model: str,
    output: Path,
    batch_size: int | None,
    device: str,
    warmup: int,
    repeats: int,
    arguments: tuple[str, ...],
    inputs: tuple[str, ...],
    threads: int,
) -> None:
    """Measures MODEL: torchvision:NAME, timm:NAME, transformers:NAME, package.module:factory or a
    run config.

    Writes graph.txt (forward and backward time, sizes of each layer) for pd-optimize, profile.json
    with all that was measured, and graph.svg, a picture.
    """
    args = dict(_argument(text) for text in arguments)
    _make_folder(output)

    import torch

    from pipedream.profiler.measure import Settings, measure

    where = _device(device)
    torch.manual_seed(0)
    with _enough_memory(device), _progress() as step:
        step("loading", 0, 0)
        loaded, args, size = _load(model, args, batch_size, inputs)
        step("capturing", 0, 0)
        settings = Settings(model, args, size, where, warmup, repeats, threads)
        graph, profile = measure(loaded, settings, lambda done, all: step("timing", done, all))
    _report(profile, _write(graph, profile, output), output)


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
    model: str, args: dict[str, Any], batch_size: int | None, inputs: tuple[str, ...]
) -> tuple[Loaded, dict[str, Any], int]:
    """The model, its factory's arguments and its batch size."""
    from pipedream.graph.config import read_config
    from pipedream.profiler.source import load, load_config

    if not model.endswith((".yaml", ".yml")):
        if ":" not in model:
            raise UserError(
                f"MODEL {model!r}: write torchvision:NAME, timm:NAME, transformers:NAME, "
                "package.module:factory or a run config's CONFIG.yaml"
            )
        size = batch_size or _BATCH_SIZE
        return load(model, args, size, inputs), args, size
    for option, given in (("--arg", args), ("--input", inputs)):
        if given:
            raise UserError(f"{option} does not go with a run config: {model} says what to use")
    path = Path(model)
    config = read_config(path)
    size = batch_size or config.batch_size
    return load_config(config, path.parent, size), dict(config.model.args), size


@contextmanager
def _enough_memory(device: str) -> Iterator[None]:
    """Running out of memory is the user's to mend, wherever it happens."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU's has no class
        if "out of memory" not in str(error) and "allocate memory" not in str(error):
            raise
        raise UserError(f"out of memory on {device}: choose a smaller --batch-size") from error


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
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
    """Writes the three files; a line that names them."""
    from pipedream.graph.draw import draw, why_text
    from pipedream.graph.text import format_graph
    from pipedream.profiler.profile import write_profile

    try:
        (output / "graph.txt").write_text(format_graph(graph), encoding="utf-8")
        write_profile(profile, output / "profile.json")
        picture = draw(graph, output / "graph", f"{profile.model}, batch {profile.batch_size}")
    except OSError as error:
        raise UserError(f"-o {output}: cannot be written: {error.strerror}") from error
    why = why_text(graph, picture)
    return f"{output}/graph.txt, profile.json, {picture.name}" + (f" ({why})" if why else "")


def _report(profile: Profile, written: str, output: Path) -> None:
    from pipedream.profiler.report import print_report

    print_report(profile)
    click.echo(f"Written: {written}")
    click.echo(f"Next: pd-optimize {output}/graph.txt --machines 2 --bandwidth 1GB")
