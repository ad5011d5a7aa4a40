"""Kills the processes of trainings, and shows that nothing of it is left in the result.

    python scripts/bench/faults/faults.py [--kills 200] [--teams] [--seed 0] [-o runs/faults]

Trains a small network (dropout, batch norm, momentum; an epoch ends with a smaller minibatch) on
two to four workers under every schedule, from a dataset or a stream: once undisturbed, and then
again and again, while processes are killed: one worker (SIGKILL or SIGTERM, or stopped by SIGSTOP),
several, the launcher, or all; while they train, save a checkpoint, or end. Some trainings have a
disk that is suddenly full (a tmpfs of their own, as root only). The run goes on from the newest
checkpoint, started again by `pd-train --max-restarts`, by hand with `--resume`, or by `--replan`
with a worker less, and is killed again. After each training

- the launcher has named a rank that was hit, every time;
- weights and losses are those of the undisturbed run, bit for bit. After `--replan` the plan is
  another: minibatches are the same ones, and losses of flush and gpipe equal up to rounding;
- metrics.jsonl has each minibatch of each epoch once, and in these minibatches every example of the
  epoch once: each carries its number through the pipeline, from what the input stage reads to the
  loss, where it is compared with the target's;
- no process is left, no file in /dev/shm or the temporary folder, none in the run folder that the
  undisturbed run does not have.

The seconds from a kill to the next update are those of a user: where the launcher has to be started
again they are of real programs alone. All others are forks of this process. One
line for each training, then tables. Exits with 1 if anything was wrong; what was is kept. With the
same folder again it goes on counting.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import checks
import click
import torch
from full_disk import FullDisk
from kills import How, Kill, Killer
from trainings import Case, Run

from pipedream.graph.choices import SCHEDULES

PLANS = ((1, 1), (2, 1), (1, 1, 1), (1, 2, 1))
CASES = tuple(
    Case(replicas, schedule, data)
    for data in ("examples", "stream")
    for schedule in SCHEDULES
    for replicas in PLANS
)
TEAM_CASES = tuple(
    Case(replicas, schedule, "examples", devices=2)
    for schedule in SCHEDULES
    for replicas in ((1,), (1, 1), (2, 1))
)
KILLS_PER_TRAINING: dict[How, int] = {"--max-restarts": 10, "--resume": 8, "--replan": 1}
FULL_DISKS_PER_TRAINING = 2
WAYS: tuple[How, ...] = ("--max-restarts", "--resume", "--replan", "--resume")
EVERY_SO_MANY_STOPS, EVERY_SO_MANY_FULL_DISKS, EVERY_SO_MANY_REAL = 7, 8, 6


@dataclass
class Outcome:
    """All that was done so far, in this run of the script and earlier ones with the same folder."""

    path: Path
    kills: list[tuple[Case, Kill]] = field(default_factory=list)
    full_disks: int = 0
    wrong: int = 0
    trainings: int = 0

    @staticmethod
    def read(path: Path) -> Outcome:
        outcome = Outcome(path)
        for line in path.read_text().splitlines() if path.exists() else []:
            outcome._add(json.loads(line))
        return outcome

    def add(self, case: Case, kills: Sequence[Kill], full_disks: int, wrong: Sequence[str]) -> None:
        """Notes a training, in the file too."""
        each = {
            "case": asdict(case),
            "kills": [asdict(kill) for kill in kills],
            "full_disks": full_disks,
            "wrong": list(wrong),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(each) + "\n")
        self._add(json.loads(json.dumps(each)))

    def _add(self, each: dict[str, Any]) -> None:
        of_case = each["case"]
        case = Case(**of_case | {"replicas": tuple(of_case["replicas"])})
        for kill in each["kills"]:
            self.kills.append((case, Kill(**kill | {"signal": signal.Signals(kill["signal"])})))
        self.full_disks += each["full_disks"]
        self.wrong += bool(each["wrong"])
        self.trainings += 1


def warm_planner(output: Path) -> None:
    """As whoever has made a plan before: the first pd-optimize ever compiles for half a minute."""
    run = Run.made(CASES[-1], output)
    command = [str(Path(sys.executable).with_name("pd-optimize")), "graph.txt", "--like"]
    command += ["plan.json", "--workers", "3", "-o", "plan"]
    subprocess.run(command, cwd=run.folder, check=True, capture_output=True)


def train(run: Run, killer: Killer, most: int, disk: FullDisk | None) -> Iterator[str]:
    """Trains to the end, with at most so many kills. Yields what went wrong on the way."""
    while True:
        left = most - len(killer.kills)
        options = ["--resume"] if run.has_saved(killer.name) else []
        options += ["--timeout", "15" if killer.stops else "120"]
        if killer.how == "--max-restarts":
            options += ["--max-restarts", str(left)]
        elif killer.how == "--replan":
            options += ["--replan"]
        launcher = run.begin(killer.name, *options, real=killer.real)
        if disk is not None and disk.filled < FULL_DISKS_PER_TRAINING:
            disk.watch(run, killer, launcher)
        else:
            one = killer.how == "--resume"
            killer.watch(launcher, 0 if disk is not None else min(left, 1) if one else left)
        again = killer.how == "--resume" and launcher.wait() in (1, -9)
        if disk is not None and disk.is_full:
            yield from disk.empty(run, killer.name, launcher.wait())
            again = True
        if not again:
            break
    if launcher.returncode and not run.is_complete(killer.name):
        yield f"exit code {launcher.returncode}"
    yield from checks.left_behind(run.temporary)


def one_training(
    number: int, run: Run, how: How, numbers: random.Random, most: int
) -> tuple[Killer, FullDisk | None, list[str]]:
    """Returns the kills, the disk if it was filled in place of them, and what was wrong."""
    before = checks.shared_memory()
    name, most = f"training{number}", min(most, KILLS_PER_TRAINING[how])
    killer = Killer(
        numbers,
        run,
        name,
        how,
        stops=number % EVERY_SO_MANY_STOPS == 0,
        real=number % EVERY_SO_MANY_REAL == 1,
    )
    disk = None
    if number % EVERY_SO_MANY_FULL_DISKS == EVERY_SO_MANY_FULL_DISKS - 1 and os.geteuid() == 0:
        disk, killer.how = FullDisk(run.folder / name), "--resume"
    try:
        wrong = list(train(run, killer, most, disk))
        wrong += [] if wrong else checks.problems(run, name, killer.kills)
        wrong += checks.abandoned(before)
    finally:
        if disk is not None:
            disk.unmount()  # what was on it goes with it
    if not wrong:
        run.forget(name)
    return killer, disk, wrong


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def counted(kills: Sequence[Kill], name: str, what: Callable[[Kill], str]) -> str:
    return table((name, "kills"), Counter(map(what, kills)).most_common())


def seconds(kills: Sequence[Kill]) -> str:
    """By how it went on: the seconds to the next update. A stop is noticed only after --timeout."""
    rows: list[Sequence[object]] = []
    timed = [kill for kill in kills if kill.seconds is not None and kill.signal.name != "SIGSTOP"]
    for how in ("--max-restarts", "--resume", "--replan", "all"):
        of_how = [kill for kill in timed if how in (kill.how, "all")]
        known = sorted(kill.seconds or 0.0 for kill in of_how)
        if known:
            spent = [kill.processor for kill in of_how if kill.processor is not None]
            figures = (median(known), known[len(known) * 9 // 10], known[-1], median(spent or [0]))
            rows.append((how, len(known), *(f"{each:.1f} s" for each in figures)))
    heads = ("goes on with", "timed", "median", "nine in ten", "longest", "on a core, median")
    return table(heads, rows)


def report(outcome: Outcome) -> str:
    kills = [kill for _, kill in outcome.kills]
    by_plan = Counter(
        (" + ".join(map(str, case.replicas)), case.schedule, case.data) for case, _ in outcome.kills
    )
    return "\n\n".join(
        (
            table(("plan", "schedule", "data", "kills"), [(*k, n) for k, n in by_plan.items()]),
            counted(kills, "killed", lambda kill: kill.victims),
            counted(kills, "while", lambda kill: kill.phase),
            counted(kills, "signal", lambda kill: kill.signal.name),
            counted(kills, "action", lambda kill: kill.action or "none"),
            seconds(kills),
            f"{len(kills)} kills and {outcome.full_disks} full disks in {outcome.trainings} "
            f"trainings, of which {outcome.wrong} went wrong",
        )
    )


@click.command()
@click.option("--kills", default=200, show_default=True, type=click.IntRange(min=1))
@click.option("--teams", is_flag=True, help="Stages on meshes, as found, without --replan.")
@click.option("--seed", default=0, show_default=True)
@click.option("-o", "--output", default="runs/faults", type=click.Path(path_type=Path))
def main(kills: int, teams: bool, seed: int, output: Path) -> None:
    cases = TEAM_CASES if teams else CASES
    ways = [how for how in WAYS if how != "--replan" or not teams]
    torch.set_num_threads(1)
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    outcome = Outcome.read(output / "trainings.jsonl")
    begun, begin = outcome.trainings, time.monotonic()
    numbers = random.Random(f"{seed}, {begun}")
    if not teams:
        warm_planner(output)
    for number in itertools.count(begun):
        left = kills - len(outcome.kills)
        if left <= 0:
            break
        case = random.Random(seed).sample(cases, len(cases))[number % len(cases)]
        how = ways[(number + number // len(cases)) % len(ways)]
        run = Run.made(case, output)
        killer, disk, wrong = one_training(number, run, how, numbers, left)
        filled = 0 if disk is None else disk.filled
        outcome.add(case, killer.kills, filled, wrong)
        what = f"{len(killer.kills)} kills" if disk is None else f"{filled} full disks"
        said = f"WRONG: {'; '.join(wrong)}" if wrong else "as undisturbed"
        done, spent = len(outcome.kills), time.monotonic() - begin
        print(f"{number}: {case}: {what}, {killer.how}: {said}; {done} of {kills}, {spent:.0f} s")
        sys.stdout.flush()
    print(f"\n{report(outcome)}")
    sys.exit(outcome.wrong > 0)


if __name__ == "__main__":
    main()
