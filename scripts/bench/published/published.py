"""What pd-optimize expects of training runs whose speed others have published, beside that speed.

    python scripts/bench/published/published.py [--folder FOLDER] [--only TEXT] [--choose GPUS]
        [--seconds S]

For each run of runs.yaml: estimates the model on an H100, prices the published degrees of
parallelism on that number of machines, and prints a row of a Markdown table. With `--choose GPUS`
also what pd-optimize would choose itself, on so many GPUs at most. Profiles and plans stay in the
folder, and what is there is not made again; a step that takes longer than `--seconds` is given up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import yaml

RUNS = Path(__file__).with_name("runs.yaml")
_DEVICES = 8
"""Of a machine."""
_HEADINGS = ("run", "GPUs", "TP, CP, PP, DP", "published", "expected", "ratio", "memory", "differs")


class Speed(NamedTuple):
    """`tokens`: per second and GPU; `degrees`: tensor x pipeline x data parallel; `memory`: bytes
    of the fullest device.
    """

    tokens: float
    degrees: str
    memory: float


@dataclass(frozen=True)
class Model:
    """What pd-profile is told. `tokens`: of an example;
    `layers`: the name of the list of layers.
    """

    name: str
    source: str
    tokens: int
    vocabulary: int
    args: Mapping[str, Any]
    layers: str
    shards: Mapping[str, str]

    def profile(self, folder: Path, microbatch: int, seconds: float) -> Path:
        """Returns the folder of the estimated profile."""
        made = folder / f"{self.name}-{microbatch}"
        if not (made / "profile.json").exists():
            arguments = [text for pair in self.args.items() for text in ("--arg", _yaml(*pair))]
            size = f"{self.tokens}:int64:{self.vocabulary}"
            shape = ["--batch-size", microbatch, "--input", size, "--dtype", "bfloat16"]
            _run("pd-profile", self.source, "--for", "h100", *shape, *arguments, made, seconds)
        return made

    def stages(self, count: int) -> str:
        """Returns what `--split` is given for so many stages of equally many layers."""
        layers = self.args.get("num_hidden_layers") or self.args["n_layer"]
        return ",".join(f"{self.layers}.{k * layers // count}" for k in range(1, count))


@dataclass(frozen=True)
class Run:
    """A published run. `seconds`: of an update, if that is published instead of `tokens`."""

    name: str
    source: str
    gpus: int
    microbatch: int
    batch: int
    model: str | None = None
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    tokens: float | None = None
    seconds: float | None = None
    differs: str = ""
    not_priced: str = ""

    @property
    def data(self) -> int:
        """The degree of data parallelism."""
        return self.gpus // (self.tensor * self.context * self.pipeline)

    def published(self, model: Model | None) -> float:
        """Returns the tokens per second and GPU."""
        if self.tokens is not None or model is None:
            return self.tokens or float("nan")
        assert self.seconds is not None
        return self.batch * model.tokens / self.seconds / self.gpus

    def options(self, model: Model) -> list[object]:
        """Returns the options of pd-optimize that make its plan the published one."""
        if self.pipeline > 1:
            replicas = ",".join([str(self.data)] * self.pipeline)
            division = ["--split", model.stages(self.pipeline), "--replicas", replicas]
        else:
            division = ["--replicas", str(self.data)]
        mesh = [degree for degree in (self.tensor, self.context) if degree > 1]
        if not mesh:
            return [*division, "--intra-op", "none"]
        # What no parameter says, such as who has which positions, is the tool's to choose.
        whole = ",R" if self.context > 1 else ""
        divided = {name: f"{placed}{whole}" for name, placed in model.shards.items()}
        given = divided if self.tensor > 1 else {"*": "R"}
        shards = [text for pair in given.items() for text in ("--shard", "=".join(pair))]
        axes = ",".join(map(str, mesh))
        return [*division, "--mesh", axes, "--intra-op", "exact", *shards]


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=Path("runs/published"))
@click.option("--only", default="", help="Runs with this text in their name.")
@click.option("--choose", type=int, default=0, help="Also the tool's own plan on so many GPUs.")
@click.option("--seconds", type=float, default=1800.0, help="At most, for each step.")
def main(folder: Path, only: str, choose: int, seconds: float) -> None:
    """Prints the table."""
    told = yaml.safe_load(RUNS.read_text(encoding="utf-8"))
    models = {name: Model(name, **each) for name, each in told["models"].items()}
    headings = [*_HEADINGS, *(["chosen", "expected"] if choose else [])]
    _print_row(headings)
    _print_row(["---"] * len(headings))
    for run in (Run(**each) for each in told["runs"]):
        if only.lower() in run.name.lower():
            model = models[run.model] if run.model is not None else None
            _print_row(_row(run, model, folder, choose, seconds))
    print()
    for name, link in told["sources"].items():
        print(f"[{name}]: {link}")


def _row(
    run: Run, model: Model | None, folder: Path, choose: int, seconds: float
) -> list[str | float]:
    published = run.published(model)
    degrees = f"{run.tensor}, {run.context}, {run.pipeline}, {run.data}"
    row: list[str | float] = [f"[{run.name}][{run.source}]", run.gpus, degrees, published]
    if model is None:
        return [*row, "-", "-", "-", run.not_priced]
    try:
        speed = _priced(run, model, folder, run.options(model), "as-published", seconds)
    except _Failed as error:
        return [*row, "-", "-", "-", str(error)]
    ratio = f"{speed.tokens / published:.2f}"
    row += [speed.tokens, ratio, f"{speed.memory / 1e9:.0f} GB", run.differs]
    if run.gpus <= choose:
        try:
            own = _priced(run, model, folder, [], "chosen", seconds)
            row += [own.degrees, own.tokens]
        except _Failed as error:
            row += [str(error), "-"]
    return row


class _Failed(Exception):
    """A command failed, or took too long; says why in one line."""


def _priced(
    run: Run, model: Model, folder: Path, options: list[object], kind: str, seconds: float
) -> Speed:
    profile = model.profile(folder, run.microbatch, seconds)
    output = profile / f"{kind}-{run.gpus}-{run.tensor}-{run.context}-{run.pipeline}-{run.batch}"
    if not (output / "plan.json").exists():
        cluster = f"dgx-h100:{run.gpus // _DEVICES}"
        asked = ["--cluster", cluster, "--schedule", "flush", "--optimizer", "adam"]
        count = ["--microbatches", run.batch // run.microbatch]
        _run("pd-optimize", profile / "graph.txt", *asked, *count, *options, output, seconds)
    plan = json.loads((output / "plan.json").read_text(encoding="utf-8"))
    return _speed(plan, run, model)


def _speed(plan: Mapping[str, Any], run: Run, model: Model) -> Speed:
    predicted, stages = plan["predicted"], plan["stages"]
    seconds = predicted.get("expected_seconds_per_minibatch")
    if seconds is None:
        seconds = predicted["simulated"]["seconds_per_minibatch"]
    teams = [_size(stage.get("mesh", [])) for stage in stages]
    replicas = [len(stage["ranks"]) for stage in stages]
    degrees = [_numbers(teams), len(stages), _numbers(replicas)]
    memory = max(stage["memory_bytes"] for stage in stages)
    tokens = run.microbatch * model.tokens / seconds / run.gpus
    return Speed(tokens, " x ".join(map(str, degrees)), memory)


def _size(mesh: list[int]) -> int:
    size = 1
    for axis in mesh:
        size *= axis
    return size


def _numbers(each: list[int]) -> str:
    return str(each[0]) if len(set(each)) == 1 else ",".join(map(str, each))


def _run(command: str, *arguments: object) -> None:
    """Runs a command of pipedream, whose last arguments are its output folder and the seconds that
    it may take. Raises _Failed.
    """
    *given, output, seconds = arguments
    program = Path(sys.executable).with_name(command)
    words = [str(each) for each in (program, *given, "-o", output)]
    assert isinstance(seconds, float)
    try:
        done = subprocess.run(words, timeout=seconds, check=False, capture_output=True, text=True)
    except subprocess.TimeoutExpired as error:
        raise _Failed(f"{command} took more than {seconds:.0f} s") from error
    if done.returncode:
        last = (done.stderr.strip() or "failed").splitlines()[-1]
        raise _Failed(f"{command}: {last}")


def _yaml(name: str, value: object) -> str:
    return f"{name}={json.dumps(value)}"


def _print_row(cells: list[Any]) -> None:
    shown = (f"{each:,.0f}" if isinstance(each, int | float) else str(each) for each in cells)
    print("| " + " | ".join(shown) + " |", flush=True)


if __name__ == "__main__":
    main()
