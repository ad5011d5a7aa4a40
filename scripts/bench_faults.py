"""Kills workers at random moments of training, and shows that nothing of it is left in the result.

    python scripts/bench_faults.py [--kills 200] [--seed 0] [-o runs/faults]

Trains a small network (dropout, batch norm, momentum) on three processes, a stage of two replicas
and one of one, once undisturbed and then again and again: SIGKILL comes to a random rank at a
random action, `pd-train --max-restarts` goes on from the newest checkpoint, and is hit again, until
there were as many kills as asked for. After each training

- its weights are those of the undisturbed one, bit for bit,
- metrics.jsonl has each minibatch of each epoch once, with the same loss,
- no process of it is left, and no file in /dev/shm.

What a rank is doing is read from the memory in which it shows its pulse to the launcher: nothing in
the product knows of this script. One line for each training, then a table of what was hit.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import click
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pipedream.graph.cluster import Cluster
from pipedream.graph.plan import Plan, PlannedGraph, Predicted, Stage, write_plan
from pipedream.profiler.capture import capture
from pipedream.runtime.checkpoint import latest, load_all
from pipedream.runtime.pulse import Pulse

EPOCHS, EXAMPLES, BATCH, EVERY = 8, 256, 4, 8
REPLICAS = (2, 1)
KILLS_PER_TRAINING = 10
CONFIG = f"""\
format: pipedream-run/1
model: {{source: "bench_faults:Network"}}
data: {{source: "bench_faults:data"}}
optimizer: {{name: SGD, args: {{lr: 0.05, momentum: 0.9}}}}
batch_size: {BATCH}
epochs: {EPOCHS}
"""


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.b = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(torch.tanh(self.norm(self.a(x)))))


def data() -> tuple[TensorDataset, None]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(EXAMPLES, 8, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1)), None


def make_plan() -> Plan:
    graph = capture(Network(), (torch.randn(BATCH, 8),)).graph
    order, ranks = list(graph.order), iter(range(sum(REPLICAS)))
    cut = len(order) - 2
    return Plan(
        graph=PlannedGraph.of(graph),
        cluster=Cluster(machines=(sum(REPLICAS),), bandwidth=(1e9,)),
        stages=tuple(
            Stage(
                stage=stage,
                nodes=tuple(nodes),
                ranks=tuple(next(ranks) for _ in range(count)),
                compute_seconds=0.0,
                parameter_bytes=0.0,
                memory_bytes=0.0,
            )
            for stage, (nodes, count) in enumerate(
                zip((order[:cut], order[cut:]), REPLICAS, strict=True)
            )
        ),
        predicted=Predicted(
            cost_model="paper",
            seconds_per_minibatch=0.0,
            lower_bound_seconds=0.0,
            one_worker_seconds=0.0,
            data_parallel_seconds=0.0,
        ),
    )


def train(folder: Path, name: str, restarts: int) -> subprocess.Popen[bytes]:
    shutil.rmtree(folder / name, ignore_errors=True)
    command = [Path(sys.executable).parent / "pd-train", "plan.json", "--config", "run.yaml"]
    options = ["--save-every", EVERY, "--keep", 3, "--max-restarts", restarts, "-o", name]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with (folder / f"{name}.txt").open("w") as output:
        return subprocess.Popen(
            [str(word) for word in (*command, *options, "--timeout", 60)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def pulse_of(launcher: int) -> Pulse | None:
    """The memory that the launcher's workers show their pulse in, while there is any."""
    with suppress(OSError):
        for link in Path(f"/proc/{launcher}/fd").iterdir():
            if "pipedream-pulse" in os.readlink(link):
                found = Pulse.__new__(Pulse)
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


class Killer:
    """Kills one rank of each start of a training, a random number of its actions after the first.

    `hit` counts where ranks were when they were killed.
    """

    def __init__(self, random_numbers: random.Random) -> None:
        self.random, self.hit = random_numbers, Counter[str]()

    def watch(self, process: subprocess.Popen[bytes], kills: int) -> int:
        """How many kills there were when the training ended."""
        done, seen = 0, set[int]()
        while process.poll() is None:
            workers = workers_of(process.pid)
            if done < kills and len(workers) == sum(REPLICAS) and not seen & set(workers):
                pulse = pulse_of(process.pid)
                if pulse is not None and self._kill(process, pulse, workers):
                    seen |= set(workers)
                    done += 1
            time.sleep(0.005)
        return done

    def _kill(self, process: subprocess.Popen[bytes], pulse: Pulse, workers: list[int]) -> bool:
        rank = self.random.randrange(len(workers))
        # Some on their way to the first action, some right then, most later.
        left = self.random.choice([0, 1, *range(2, 100)])
        words = ""
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            now = pulse.of(rank).words
            if now != words:
                words, left = now, left - 1
            if words and left <= 0:
                break
            time.sleep(0.0003)
        with suppress(ProcessLookupError):
            os.kill(workers[rank], signal.SIGKILL)
            action = words.partition(" at ")[2].partition(",")[0]
            self.hit["".join(c for c in action.partition("@")[0] if c.isupper())] += 1
            return True
        return False


def left_behind(session: int) -> list[str]:
    """The processes that still belong to the session."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError, IndexError):
            if path.name.isdigit() and os.getsid(int(path.name)) == session:
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found.append((path / "cmdline").read_text().replace("\0", " "))
    return found


def abandoned(before: set[Path]) -> set[Path]:
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
    return found


def told(run: Path) -> list[tuple[int, int, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    read = map(json.loads, lines)
    return [(line["epoch"], line["minibatch"], line["loss"]) for line in read]


def check(folder: Path, name: str, process: subprocess.Popen[bytes], memory: set[Path]) -> None:
    """Ends the program where anything differs from the undisturbed training."""
    text = (folder / f"{name}.txt").read_text()
    problems = [] if process.returncode == 0 else [f"exit code {process.returncode}"]
    problems += [f"left behind: {line}" for line in left_behind(process.pid)]
    problems += [f"left behind: {path}" for path in abandoned(memory)]
    if not problems:
        whole, here = (latest(folder / run / "checkpoints") for run in ("undisturbed", name))
        assert whole is not None
        assert here is not None
        expected, found = load_all(whole), load_all(here)
        same = expected.keys() == found.keys()
        if not same or any(not torch.equal(found[n], t) for n, t in expected.items()):
            problems.append("the weights differ")
        if told(folder / name) != told(folder / "undisturbed"):
            problems.append("minibatches or losses differ")
    if problems:
        sys.exit(f"{name}: {'; '.join(problems)}\n{text}")


@click.command()
@click.option("--kills", default=200, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True)
@click.option("-o", "--output", default="runs/faults", type=click.Path(path_type=Path))
def main(kills: int, seed: int, output: Path) -> None:
    folder = output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(make_plan(), folder / "plan.json")
    (folder / "run.yaml").write_text(CONFIG)
    memory = set(Path("/dev/shm").iterdir())
    killer = Killer(random.Random(seed))
    undisturbed = train(folder, "undisturbed", 0)
    undisturbed.wait()
    check(folder, "undisturbed", undisturbed, memory)
    done, number, begin = 0, 0, time.monotonic()
    while done < kills:
        number += 1
        wanted = min(KILLS_PER_TRAINING, kills - done)
        process = train(folder, f"killed{number}", wanted)
        done += (now := killer.watch(process, wanted))
        check(folder, f"killed{number}", process, memory)
        shutil.rmtree(folder / f"killed{number}")
        seconds = time.monotonic() - begin
        print(
            f"training {number}: {now} kills, the same bit for bit; "
            f"{done} of {kills} after {seconds:.0f} s",
            flush=True,
        )
    print(
        "what was killed in the middle: "
        + ", ".join(
            f"{kind or 'before the first action'} {count}"
            for kind, count in killer.hit.most_common()
        )
    )


if __name__ == "__main__":
    main()
