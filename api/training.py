"""`pipedream.train` and `pipedream.evaluate`: pd-train from Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from pipedream.command_line import checked, words
from pipedream.graph.errors import UserError
from pipedream.graph.plan import Plan, write_plan
from pipedream.planning import Planned
from pipedream.runtime.cli import main as pd_train
from pipedream.runtime.run.job import EVALUATION

if TYPE_CHECKING:
    import pandas as pd

_OPTIONS = [each.name for each in pd_train.params if each.name]

_NEWEST = 1_000
"""Lines of pd-train that are kept for an error."""


@dataclass(frozen=True)
class Run:
    """A finished run in its folder."""

    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """Times, losses and memory of the run, as in summary.json."""
        read: dict[str, Any] = json.loads((self.folder / "summary.json").read_text("utf-8"))
        return read

    @property
    def metrics(self) -> pd.DataFrame:
        """A row for each minibatch, as in metrics.jsonl."""
        import pandas as pd

        return pd.read_json(self.folder / "metrics.jsonl", lines=True)

    def _repr_html_(self) -> str:
        import pandas as pd

        summary = self.summary
        shown = partial(pd.DataFrame.to_html, index=False, float_format="{:.4g}".format)
        ranks = shown(pd.DataFrame(summary.pop("ranks")))
        figures = shown(pd.DataFrame(summary.items()), header=False)
        return f"<b>{escape(str(self.folder))}</b>{figures}{ranks}"


@partial(checked, options=_OPTIONS)
def train(
    plan: Planned | Plan | str | Path,
    config: Mapping[str, Any] | str | Path,
    output: str | Path,
    **options: Any,
) -> Run:
    """Trains a plan on this machine, one process for each worker, in the folder `output`.

    `config` is a run config: a file, or what one would have in it; then its names and paths are
    relative to the current folder. `options` are those of pd-train, with `_` for `-`: `train(plan,
    "run.yaml", "runs/first", epochs=3, save_every=100)`. Prints what pd-train prints, as the run
    goes on. Ctrl-C, or the interrupt of a notebook, ends the run in order.

    Raises UserError with what pd-train says if it fails, KeyboardInterrupt if it was stopped.
    """
    _run(plan, config, {"output": Path(output), **options})
    return Run(Path(output))


@partial(checked, options=_OPTIONS)
def evaluate(
    plan: Planned | Plan | str | Path,
    config: Mapping[str, Any] | str | Path,
    output: str | Path,
    **options: Any,
) -> dict[str, Any]:
    """Evaluates the newest checkpoint of the run in `output`, or `checkpoint=FOLDER`, on the
    held-out data: loss, accuracy and the metrics of the run config, as in evaluation.json.

    Arguments and errors are those of `train`.
    """
    _run(plan, config, {"output": Path(output), "evaluate_only": True, **options})
    found: dict[str, Any] = json.loads((Path(output) / EVALUATION).read_text("utf-8"))
    return found


def _run(
    plan: Planned | Plan | str | Path,
    config: Mapping[str, Any] | str | Path,
    options: Mapping[str, Any],
) -> None:
    """Runs pd-train. Raises UserError with its last word if it fails, KeyboardInterrupt."""
    with TemporaryDirectory() as folder, _as_file(config) as file:
        asked = {"config": file, **options}
        command = [_program(), str(_written(plan, Path(folder))), *words(asked)]
        code, lines = _follow(command)
    if code == 130:
        raise KeyboardInterrupt
    if code:
        said = [line for line in lines if line.startswith("pd-train: ")]
        raise UserError((said or [*lines] or ["pd-train failed"])[-1][:2_000])


def _follow(command: Sequence[str]) -> tuple[int, Sequence[str]]:
    """Runs the command and prints its lines as they come; returns its exit code and newest lines.

    A terminal, as a notebook, interrupts the command together with this process: it is waited for
    while it saves. A second interrupt kills it.
    """
    newest: deque[str] = deque(maxlen=_NEWEST)

    def follow(lines: Iterable[str]) -> None:
        for line in lines:
            newest.append(line.rstrip("\n"))
            print(line, end="", flush=True)

    # In a notebook FORCE_COLOR is set: pd-train would draw a live table, over and over.
    environment = {key: value for key, value in os.environ.items() if key != "FORCE_COLOR"}
    pipe, merged = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(
        command, stdout=pipe, stderr=merged, text=True, errors="replace", env=environment
    ) as process:
        assert process.stdout is not None
        try:
            try:
                follow(process.stdout)
            except KeyboardInterrupt:
                follow(process.stdout)
            return process.wait(), newest
        except BaseException:
            process.kill()
            raise


@contextmanager
def _as_file(config: Mapping[str, Any] | str | Path) -> Iterator[Path]:
    """Gives its path, for the time being that of a new file if it is none."""
    if isinstance(config, (str, Path)):
        yield Path(config)
        return
    with NamedTemporaryFile("w", dir=".", prefix=".run-", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(dict(config), file)
        file.flush()
        yield Path(file.name)


def _program() -> str:
    beside = Path(sys.executable).with_name("pd-train")
    return str(beside) if beside.exists() else shutil.which("pd-train") or "pd-train"


def _written(plan: Planned | Plan | str | Path, folder: Path) -> Path:
    """Returns the path of its plan.json, beside graph.txt if that is known."""
    if isinstance(plan, Planned):
        return plan.write(folder) / "plan.json"
    if isinstance(plan, Plan):
        write_plan(plan, folder / "plan.json")
        return folder / "plan.json"
    return Path(plan)
