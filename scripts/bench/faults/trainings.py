"""Trainings to be killed: real `pd-train` programs in a folder, and what they do at the moment."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import TypeAlias

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401 - what the end of a run would import
import trained

sys.path.append(str(Path(__file__).parents[3] / "tests" / "support"))

from plans import cut, make_plan

import pipedream.runtime.trainer  # noqa: F401 - what a worker would import
from pipedream.capture.export import capture
from pipedream.graph.choices import ScheduleName
from pipedream.graph.model import Graph, format_graph
from pipedream.graph.plan import PlanningOptions, write_plan
from pipedream.runtime.cli import main
from pipedream.runtime.supervise.forked import Forked
from pipedream.runtime.supervise.heartbeat import Heartbeats

Launcher: TypeAlias = subprocess.Popen[bytes] | Forked

EVERY = 4
UNDISTURBED = "undisturbed"
_PROGRAM = Path(sys.executable).with_name("pd-train")
_SOURCES = {"examples": '"trained:data"', "stream": '"trained:stream"'}
_CONFIG = f"""\
format: pipedream-run/1
model: {{source: "trained:Network"}}
data: {{source: SOURCE}}
loss: "trained:loss"
optimizer: {{name: SGD, args: {{lr: 0.05, momentum: 0.9}}}}
batch_size: {trained.BATCH}
microbatches: 4
dtype: float64
epochs: {trained.EPOCHS}
"""


@dataclass(frozen=True)
class Case:
    """What is trained: stages with these numbers of workers; `data`: examples or stream. With
    `devices` each worker is a team of so many ranks.
    """

    replicas: tuple[int, ...]
    schedule: ScheduleName
    data: str
    devices: int = 1

    def __str__(self) -> str:
        team = f"x{self.devices}" if self.devices > 1 else ""
        first, *others = map(str, self.replicas)
        return f"{' + '.join([first + team, *others])}, {self.schedule}, {self.data}"


@dataclass(frozen=True)
class Run:
    """Trainings of one case in a folder of its own: the plan, the config, and results by name."""

    case: Case
    folder: Path

    @staticmethod
    def made(case: Case, folder: Path) -> Run:
        """The run in its own folder in this one, where it may be already."""
        name = str(case).replace(" ", "").replace("+", "-").replace(",", "-")
        run = Run(case, folder / name)
        return run if (run.folder / UNDISTURBED / "summary.json").exists() else run._make()

    def _make(self) -> Run:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        config = self.folder / "run.yaml"
        config.write_text(_CONFIG.replace("SOURCE", _source(self.case)))
        if self.case.devices > 1:
            self._plan_teams()
        else:
            self._plan()
        self._train_undisturbed()
        return self

    def _plan(self) -> None:
        case = self.case
        captured = capture(trained.Network().double(), (trained.examples()[: trained.BATCH],)).graph
        timed = {name: replace(node, forward_seconds=1e-3) for name, node in captured.nodes.items()}
        graph = Graph(timed, captured.edges)
        plan = make_plan(graph, cut(graph, len(case.replicas)), case.replicas, case.schedule)
        # Pipelines without replicas, of which there always is one for fewer workers.
        options = PlanningOptions(straight=True)
        write_plan(plan.model_copy(update={"asked": options}), self.folder / "plan.json")
        (self.folder / "graph.txt").write_text(format_graph(graph))

    def _plan_teams(self) -> None:
        """As pd-optimize divides the stages, over links on which everything is worth dividing."""
        case = self.case
        cut_at = ("--split", "b", "--replicas", ",".join(map(str, case.replicas)))
        each = () if case.schedule in ("weight-stashing", "vertical-sync") else ("4",)
        for words in (
            ("pd-profile", "run.yaml", "-o", ".", "--repeats", "2"),
            (
                *("pd-optimize", "graph.txt", "--machines", str(self.workers), "--bandwidth"),
                *("1TB", "--mesh", str(case.devices), "--schedule", case.schedule, "-o", "."),
                *(word for count in each for word in ("--microbatches", count)),
                *(cut_at if len(case.replicas) > 1 else ()),
            ),
        ):
            command = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
            variables = os.environ | self._variables("plan") | {"TMPDIR": gettempdir()}
            subprocess.run(command, cwd=self.folder, env=variables, check=True, capture_output=True)
        assert "S(" in (self.folder / "plan.json").read_text(), "nothing is divided"

    @property
    def workers(self) -> int:
        return sum(self.case.replicas) * self.case.devices

    @property
    def temporary(self) -> Path:
        return self.folder / "temporary"

    def begin(self, name: str, *options: str, real: bool) -> Launcher:
        """`pd-train` in a session of its own; what it says goes to NAME.txt.

        If it need not be a `real` program, it is a fork of this process, which has imported torch.
        """
        words = ["plan.json", "--config", "run.yaml", "-o", name, "--save-every", str(EVERY)]
        words += ["--keep", "3", *options]
        variables = self._variables(name)
        with (self.folder / f"{name}.txt").open("ab") as said:
            if not real:
                return Forked(partial(self._be_forked, words, variables, said.fileno()))
            return subprocess.Popen(
                [str(_PROGRAM), *words],
                cwd=self.folder,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def _variables(self, name: str) -> dict[str, str]:
        here = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        return {
            trained.SEEN: str(self.folder / f"{name}.seen"),
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": os.pathsep.join(filter(None, here)),
            "OMP_NUM_THREADS": "1",
        }

    def _be_forked(self, words: list[str], variables: dict[str, str], said: int) -> None:
        os.chdir(self.folder)
        os.environ.update(variables)
        for descriptor in (1, 2):
            os.dup2(said, descriptor)
        main(words)

    def _train_undisturbed(self) -> None:
        if self.begin(UNDISTURBED, real=False).wait():
            sys.exit(self.said(UNDISTURBED))

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def named(self, name: str) -> list[str]:
        """The lines by which the launcher named a rank."""
        return [
            each for each in self.said(name).splitlines() if re.match(r"pd-train: rank \d", each)
        ]

    def is_complete(self, name: str) -> bool:
        """Whether the last start has found nothing left to do: a worker was killed as it left."""
        return "has completed all" in self.said(name).splitlines()[-1]

    def has_saved(self, name: str) -> bool:
        return (self.folder / name / "checkpoints" / "latest").exists()

    def is_saving(self, name: str) -> bool:
        return any((self.folder / name / "checkpoints").glob("*.partial"))

    def forget(self, name: str) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        for ending in ("txt", "seen"):
            (self.folder / f"{name}.{ending}").unlink()


def _source(case: Case) -> str:
    source = _SOURCES[case.data]
    return f"{source}, examples: {trained.EXAMPLES}" if case.data == "stream" else source


def workers_of(launcher: int) -> list[int]:
    """The process ids of the workers, by rank."""
    with suppress(OSError):
        return [
            int(pid)
            for task in Path(f"/proc/{launcher}/task").iterdir()
            for pid in (task / "children").read_text().split()
        ]
    return []


def heartbeats_of(launcher: int) -> Heartbeats | None:
    """The memory that the launcher's workers show their heartbeat in, while there is any."""
    with suppress(OSError, ValueError):
        for link in Path(f"/proc/{launcher}/fd").iterdir():
            if "pipedream-heartbeats" in os.readlink(link):
                with link.open("r+b") as file:
                    return Heartbeats(mmap.mmap(file.fileno(), 0))
    return None


def words_of(heartbeats: Heartbeats, ranks: Sequence[int]) -> list[str]:
    """What each rank says that it is doing."""
    return [heartbeats.of(rank).words for rank in ranks]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
