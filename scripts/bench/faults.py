"""Hits workers at random moments of training, and shows that nothing of it is left in the result.

    python scripts/bench/faults.py [--hits 200] [--seed 0] [-o runs/faults]

Trains a small network (dropout, batch norm, momentum; an epoch ends with a smaller minibatch) under
each of four plans and two schedules: once undisturbed, and then again and again, while a random
rank is hit at a random action: killed (SIGKILL), asked to end (SIGTERM), or stopped (SIGSTOP). The
run goes on from the newest checkpoint, started again by `pd-train --max-restarts` or by hand with
`--resume`, and is hit again, until there were as many hits as asked for. After each training

- the launcher has named the rank that was hit, every time;
- weights and losses are those of the undisturbed run, bit for bit;
- metrics.jsonl has each minibatch of each epoch once, and in these minibatches every example of the
  epoch once: each carries its number through the pipeline, from what the input stage reads to the
  loss, where it is compared with the target's;
- no process is left, no file in /dev/shm or the temporary folder, none in the run folder that the
  undisturbed run does not have.

Workers are processes of their own that meet over gloo, forked off this one, which has imported
torch. What a rank is doing is read from the memory in which it shows its heartbeat to the launcher:
nothing in the product knows of this script. One line for each training, then tables.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from forked import Child, become, forking
from plans import cut, make_plan

import pipedream.runtime.cli
import pipedream.runtime.trainer  # noqa: F401 - what a worker would import
from pipedream.capture.export import capture
from pipedream.graph.choices import ScheduleName
from pipedream.graph.plan import write_plan
from pipedream.runtime.checkpoint.files import latest, load_all
from pipedream.runtime.supervise.heartbeat import Heartbeats

EPOCHS, EXAMPLES, BATCH, EVERY = 3, 62, 4, 4
CASES: tuple[tuple[tuple[int, ...], ScheduleName], ...] = tuple(
    (replicas, schedule)
    for replicas in ((1, 1), (2, 1), (1, 1, 1), (1, 2, 1))
    for schedule in ("weight-stashing", "flush")
)
HITS_PER_TRAINING, FARTHEST = 8, 40
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
WEIGHTS, WEIGHTS_WITH_STOPS = (3, 1, 0), (3, 1, 3)
SEEN = "FAULTS_SEEN"
CONFIG = f"""\
format: pipedream-run/1
model: {{source: "faults:Network"}}
data: {{source: "faults:data"}}
loss: "faults:loss"
optimizer: {{name: SGD, args: {{lr: 0.05, momentum: 0.9}}}}
batch_size: {BATCH}
microbatches: 4
dtype: float64
epochs: {EPOCHS}
"""


# What is trained -------------------------------------------------------------------------------


class Network(nn.Module):
    """Classifies by all numbers but the first, the number of the example, which is passed on.

    It comes along in one tensor with the rest, so that later stages have it from the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat((x[:, :1], torch.tanh(self.norm(self.a(x[:, 1:])))), 1)
        x = torch.cat((x[:, :1], torch.tanh(self.b(self.drop(x[:, 1:])))), 1)
        return self.c(x[:, 1:]), x[:, 0]


def examples() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(EXAMPLES, 7, generator=generator, dtype=torch.float64)
    x[:, 0] = torch.arange(EXAMPLES)
    return x


def data() -> tuple[list[tuple[Tensor, int]], None]:
    return [(x, number) for number, x in enumerate(examples())], None


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Of the target, the number of each example, the class follows; notes which were seen."""
    scores, numbers = output
    assert numbers.tolist() == target.tolist(), "inputs and targets are of different examples"
    value = cross_entropy(scores, examples()[target, 1:4].argmax(1))
    with Path(os.environ[SEEN]).open("a") as file:
        file.write(json.dumps([value.item(), target.tolist()]) + "\n")
    return value


# Training and hitting --------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Trainings of one plan and schedule, in a folder of its own: the plan, the config, results."""

    folder: Path
    workers: int

    def begin(self, name: str, restarts: int, resume: bool, timeout: int) -> Child:
        """`pd-train` in a session of its own; what it says goes to NAME.txt."""
        options = ["--save-every", EVERY, "--keep", 3, "--max-restarts", restarts, "-o", name]
        options += ["--timeout", timeout, *["--resume"] * resume]
        words = ["pd-train", "plan.json", "--config", "run.yaml", *map(str, options)]

        def work() -> None:
            os.setsid()
            os.chdir(self.folder)
            for descriptor in (1, 2):
                os.dup2(os.open(f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
            os.environ |= {SEEN: str(self.folder / f"{name}.seen"), "TMPDIR": str(self.temporary)}
            with forking():
                become(words)

        return Child(work)

    @property
    def temporary(self) -> Path:
        return self.folder / "temporary"

    def told(self, name: str) -> list[str]:
        """The lines by which the launcher named a rank."""
        text = (self.folder / f"{name}.txt").read_text()
        return [line for line in text.splitlines() if re.match(r"pd-train: rank \d", line)]


def make_run(folder: Path, replicas: Sequence[int], schedule: ScheduleName) -> Run:
    graph = capture(Network().double(), (examples()[:BATCH],)).graph
    plan = make_plan(graph, cut(graph, len(replicas)), replicas, schedule)
    shutil.rmtree(folder, ignore_errors=True)
    run = Run(folder, plan.workers)
    run.temporary.mkdir(parents=True)
    write_plan(plan, folder / "plan.json")
    (folder / "run.yaml").write_text(CONFIG)
    return run


@dataclass(frozen=True)
class Hit:
    """A signal to a rank, and what it was doing: the kind of action, none if it had not begun."""

    rank: int
    signal: signal.Signals
    action: str

    @property
    def line(self) -> str:
        """What the launcher has to say of it."""
        if self.signal != signal.SIGSTOP:
            return f"pd-train: rank {self.rank} was killed by {self.signal.name}"
        how = "has not responded" if self.action else "no longer responds to the other ranks"
        return f"pd-train: rank {self.rank} {how}"


@dataclass
class Hitter:
    """Hits one rank of each start of a training, a random number of its actions after the first."""

    random: random.Random
    weights: Sequence[int]
    hits: list[Hit] = field(default_factory=list)

    def watch(self, run: Run, process: Child, most: int) -> None:
        """Until the process ends; at most so many hits."""
        done, seen = 0, set[int]()
        while process.poll() is None:
            workers = workers_of(process.pid)
            if done < most and len(workers) == run.workers and not seen & set(workers):
                heartbeats = pulse_of(process.pid)
                if heartbeats is not None:
                    done += self._hit(process, heartbeats, workers)
                    seen |= set(workers)
            time.sleep(0.005)

    def _hit(self, process: Child, heartbeats: Heartbeats, workers: list[int]) -> bool:
        rank = self.random.randrange(len(workers))
        (number,) = self.random.choices(SIGNALS, self.weights)
        words, left = "", self.random.randrange(1, FARTHEST)
        if self.random.random() < 0.1:  # on its way to the first action, or soon after
            left = 0
            time.sleep(self.random.uniform(0.0, 1.0))
            words = heartbeats.of(rank).words
        alive = Path(f"/proc/{workers[rank]}")
        while left and process.poll() is None and alive.exists():
            now = heartbeats.of(rank).words
            if now != words:
                words, left = now, left - 1
            time.sleep(0.0003)
        with suppress(ProcessLookupError):
            os.kill(workers[rank], number)
            action = words.partition(" at ")[2].partition("@")[0].partition(",")[0]
            self.hits.append(Hit(rank, number, "".join(filter(str.isupper, action))))
            return True
        return False


def pulse_of(launcher: int) -> Heartbeats | None:
    """The memory that the launcher's workers show their heartbeat in, while there is any."""
    with suppress(OSError):
        for link in Path(f"/proc/{launcher}/fd").iterdir():
            if "pipedream-heartbeats" in os.readlink(link):
                found = Heartbeats.__new__(Heartbeats)
                with link.open("r+b") as file:
                    found.memory = mmap.mmap(file.fileno(), 0)
                return found
    return None


def workers_of(launcher: int) -> list[int]:
    """The process ids of the workers, by rank."""
    with suppress(OSError):
        return [
            int(pid)
            for task in Path(f"/proc/{launcher}/task").iterdir()
            for pid in (task / "children").read_text().split()
        ]
    return []


def train(run: Run, name: str, hitter: Hitter | None, most: int, by_hand: bool) -> set[int]:
    """Trains to the end; the sessions of its processes."""
    sessions = set()
    left = most
    while True:
        saved = (run.folder / name / "checkpoints" / "latest").exists()
        # Stops are waited for; else a busy machine may take long for anything.
        timeout = 15 if hitter and hitter.weights == WEIGHTS_WITH_STOPS else 120
        process = run.begin(name, 0 if by_hand else most, resume=saved, timeout=timeout)
        sessions.add(process.pid)
        before = len(hitter.hits) if hitter else 0
        if hitter is not None:
            hitter.watch(run, process, min(left, 1) if by_hand else left)
            left -= len(hitter.hits) - before
        if process.wait() != 1 or not by_hand:
            break
    if process.returncode:
        fail(run, name, [f"exit code {process.returncode}"])
    return sessions


# What is to be found afterwards ----------------------------------------------------------------


def fail(run: Run, name: str, problems: Sequence[str]) -> None:
    text = (run.folder / f"{name}.txt").read_text()
    sys.exit(f"{run.folder / name}: {'; '.join(problems)}\n{text}")


def check(run: Run, name: str, hits: Sequence[Hit]) -> Iterator[str]:
    """What differs from the undisturbed training."""
    told, expected = run.told(name), [hit.line for hit in hits]
    for line, start in zip(told, expected, strict=False):
        if not line.startswith(start):
            yield f"{start!r} was expected in place of {line!r}"
    if len(told) != len(expected):
        yield f"{len(told)} lines for {len(expected)} hits"
    if files(run.folder / name) != files(run.folder / "undisturbed"):
        yield f"other files: {sorted(files(run.folder / name) ^ files(run.folder / 'undisturbed'))}"
    if list(run.temporary.iterdir()):
        yield f"left behind: {list(run.temporary.iterdir())}"
    found, wanted = (losses(run.folder / kind) for kind in (name, "undisturbed"))
    if found != wanted:
        yield "minibatches or losses differ"
    yield from check_seen(run, name, found)
    whole, here = (latest(run.folder / kind / "checkpoints") for kind in ("undisturbed", name))
    assert whole is not None
    assert here is not None
    for part in ("", "optimizer"):
        one, other = load_all(whole / part), load_all(here / part)
        if one.keys() != other.keys() or any(not torch.equal(other[n], t) for n, t in one.items()):
            yield f"the weights differ {part}"


def check_seen(run: Run, name: str, told: Sequence[tuple[int, int, float]]) -> Iterator[str]:
    """Which examples made the losses of the run. No two minibatches have the same loss."""
    seen: dict[float, set[tuple[int, ...]]] = defaultdict(set)
    for line in (run.folder / f"{name}.seen").read_text().splitlines():
        value, numbers = json.loads(line)
        seen[value].add(tuple(numbers))
    for epoch in range(1, EPOCHS + 1):
        made = [seen[value] for number, _, value in told if number == epoch]
        if any(len(of_one) != 1 for of_one in made):
            yield f"epoch {epoch}: losses that no examples gave, or several"
        numbers = sorted(number for of_one in made for one in of_one for number in one)
        if numbers != list(range(EXAMPLES)):
            yield f"epoch {epoch}: examples skipped or seen twice"


def losses(folder: Path) -> list[tuple[int, int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    read = map(json.loads, lines)
    return [(line["epoch"], line["minibatch"], line["loss"]) for line in read]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def left_behind(sessions: set[int]) -> Iterator[str]:
    """The processes that still belong to one of the sessions."""
    for path in Path("/proc").iterdir():
        with suppress(OSError, IndexError):
            if path.name.isdigit() and os.getsid(int(path.name)) in sessions:
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    yield f"left behind: process {path.name}"


def abandoned(before: set[Path]) -> Iterator[str]:
    """What is new in /dev/shm, stays there for a while, and no living process has mapped."""
    found = set(Path("/dev/shm").iterdir()) - before
    deadline = time.monotonic() + 5
    while found and time.monotonic() < deadline:
        time.sleep(0.1)
        found &= set(Path("/dev/shm").iterdir())
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            text = path.read_text()
            found -= {file for file in found if str(file) in text}
    yield from (f"left behind: {path}" for path in found)


# The whole -------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def report(hits: dict[tuple[tuple[int, ...], str], list[Hit]]) -> str:
    """Tables of where and how workers were hit."""
    rows: list[list[object]] = []
    for (replicas, schedule), found in hits.items():
        by_signal = Counter(hit.signal for hit in found)
        plan = " + ".join(map(str, replicas))
        rows.append([plan, schedule, len(found), *(by_signal[number] for number in SIGNALS)])
    everything = [hit for found in hits.values() for hit in found]
    actions = Counter(hit.action or "before the first" for hit in everything)
    return "\n\n".join(
        (
            table(("plan", "schedule", "hits", *(number.name for number in SIGNALS)), rows),
            table(("action", "hits"), actions.most_common()),
        )
    )


@click.command()
@click.option("--hits", default=200, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True)
@click.option("-o", "--output", default="runs/faults", type=click.Path(path_type=Path))
def main(hits: int, seed: int, output: Path) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    memory = set(Path("/dev/shm").iterdir())
    numbers, begin, number = random.Random(seed), time.monotonic(), 0
    runs: dict[tuple[tuple[int, ...], ScheduleName], Run] = {}
    found: dict[tuple[tuple[int, ...], str], list[Hit]] = {case: [] for case in CASES}
    while (left := hits - sum(map(len, found.values()))) > 0:
        case = CASES[number % len(CASES)]
        number += 1
        if case not in runs:
            replicas, schedule = case
            folder = output.resolve() / f"{'-'.join(map(str, replicas))}-{schedule}"
            runs[case] = make_run(folder, replicas, schedule)
            train(runs[case], "undisturbed", None, 0, by_hand=False)
        run, name = runs[case], f"hit{number}"
        hitter = Hitter(numbers, WEIGHTS_WITH_STOPS if number % 5 == 0 else WEIGHTS)
        by_hand = (number + number // len(CASES)) % 2 == 1
        sessions = train(run, name, hitter, min(HITS_PER_TRAINING, left), by_hand)
        if len(run.told(name)) == len(hitter.hits) - 1:
            hitter.hits.pop()  # it came when the rank had just ended well
        problems = [*check(run, name, hitter.hits), *left_behind(sessions), *abandoned(memory)]
        if problems:
            fail(run, name, problems)
        found[case] += hitter.hits
        shutil.rmtree(run.folder / name)
        for ending in ("txt", "seen"):
            (run.folder / f"{name}.{ending}").unlink()
        seconds, done = time.monotonic() - begin, sum(map(len, found.values()))
        how = "by hand" if by_hand else "by the launcher"
        print(
            f"{case[0]}, {case[1]}, started again {how}: {len(hitter.hits)} hits, the same bit for "
            f"bit; {done} of {hits} after {seconds:.0f} s",
            flush=True,
        )
    print(f"\n{report(found)}")


if __name__ == "__main__":
    main()
