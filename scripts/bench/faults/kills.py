"""Who is killed, and when: the next moment of its kind in a training that is watched from outside.

What a rank is doing is read from the memory in which it shows its heartbeat to the launcher:
nothing in the product knows of these scripts.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from trainings import Launcher, Run, alive, heartbeats_of, words_of, workers_of

from pipedream.runtime.supervise.heartbeat import Heartbeats

Victims: TypeAlias = Literal["one worker", "several workers", "the launcher", "all"]
Phase: TypeAlias = Literal["training", "saving", "ending"]
How: TypeAlias = Literal["--max-restarts", "--resume", "--replan"]
"""How the training goes on afterwards."""

FARTHEST = 40
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
_WEIGHTS, _WEIGHTS_WITH_STOPS = (3, 1, 0), (3, 1, 3)
_AT_THE_END = "at the end of the run"
_UNTIL_ORPHANS_ARE_GONE = 5.0  # seconds


@dataclass
class Kill:
    """A signal to the `ranks`, none if it was for the launcher alone, and what `action` the first
    of them was at. `seconds`: until the next update of any rank, if there was one and the program
    was a real one: forks are faster only where the launcher starts anew. `processor`: those that
    all processes of the new start had on a core, whatever else went on on the machine.
    """

    victims: Victims
    phase: Phase
    how: How
    ranks: list[int]
    signal: signal.Signals
    action: str
    at: float
    seconds: float | None = None
    processor: float | None = None
    trained_on: bool = False

    def explains(self, line: str) -> bool:
        """Whether the launcher's line is what it has to say of this, if it is still there."""
        if self.victims in ("the launcher", "all"):
            return False
        words = [f"was killed by {self.signal.name}"]
        if self.signal == signal.SIGSTOP:
            words = ["has not responded", "no longer responds to the other ranks"]
        return any(
            line.startswith(f"pd-train: rank {rank} {each}")
            for rank in self.ranks
            for each in words
        )

    @property
    def may_be_unnamed(self) -> bool:
        """With the launcher nobody is left to name it; at the end the worker may have just left."""
        return self.victims in ("the launcher", "all") or self.phase == "ending"


@dataclass
class Started:
    """One start of all workers by one launcher."""

    launcher: Launcher
    workers: list[int]
    heartbeats: Heartbeats

    def words(self) -> list[str]:
        return words_of(self.heartbeats, range(len(self.workers)))

    def processor_seconds(self) -> float:
        """Of the launcher, and of the workers with what they have started and waited for."""
        own = [_processor_times(pid) for pid in self.workers]
        return sum(_processor_times(self.launcher.pid)[:2]) + sum(map(sum, own))

    def until(self, condition: Callable[[], bool], pause: float) -> bool:
        """Waits for the condition; False if it cannot come: a worker or the launcher has ended."""
        while not condition():
            if self.launcher.poll() is not None or not all(map(alive, self.workers)):
                return condition()
            time.sleep(pause)
        return True


@dataclass
class Killer:
    """Kills in a training what and when `random` says.

    `spent`: seconds on a core of each launcher before it had to start its workers again.
    """

    random: random.Random
    run: Run
    name: str
    how: How
    stops: bool
    real: bool
    kills: list[Kill] = field(default_factory=list)
    spent: dict[int, float] = field(default_factory=dict)

    def watch(self, launcher: Launcher, most: int) -> None:
        """Until the launcher ends; kills once in each start of the workers, `most` times in all."""
        seen: set[int] = set()
        workers = self.run.workers
        while launcher.poll() is None:
            found = workers_of(launcher.pid)
            if len(found) == workers and not seen & set(found):
                heartbeats = heartbeats_of(launcher.pid)
                if heartbeats is not None:
                    seen |= set(found)
                    killed = self._one_start(Started(launcher, found, heartbeats), most)
                    most -= killed
                    workers -= killed and self.how == "--replan"
            time.sleep(0.005)

    def _one_start(self, started: Started, most: int) -> bool:
        early = most > 0 and self.random.random() < 0.1
        if not early:
            self._time_next_update(started)
        if most <= 0:
            return False
        victims, phase = self._choose(len(started.workers))
        ranks = list(range(len(started.workers)))
        if victims == "one worker":  # at the end rank 0 is at work for longest
            ranks = [0 if phase == "ending" else self.random.choice(ranks)]
        elif victims == "several workers":
            ranks = self.random.sample(ranks, self.random.randint(2, len(ranks)))
        elif victims == "the launcher":
            ranks = []
        weights = _WEIGHTS_WITH_STOPS if self.stops else _WEIGHTS
        (number,) = self.random.choices(_SIGNALS, weights)
        if victims != "one worker":
            number = signal.SIGKILL
        if early:  # on its way to the first action, or soon after
            time.sleep(self.random.uniform(0, 4))
        elif not self._wait_for(phase, started, ranks[0] if ranks else 0):
            return False
        return self._kill(started, victims, "training" if early else phase, ranks, number)

    def _choose(self, workers: int) -> tuple[Victims, Phase]:
        of_workers: tuple[Victims, ...] = ("one worker", "one worker", "several workers")
        anybody: tuple[Victims, ...] = ("one worker", "several workers", "the launcher", "all")
        victims = self.random.choice(anybody if self.how == "--resume" else of_workers)
        often: tuple[Phase, ...] = ("training", "training", "training", "saving", "saving")
        phases: tuple[Phase, ...] = (*often, "ending")
        if self.how == "--replan":
            return "one worker", self.random.choice(often)
        return victims, self.random.choice(phases)

    def _time_next_update(self, started: Started) -> None:
        """Notes when the first update after the last kill is made, if one is."""
        pending = [kill for kill in self.kills[-1:] if not kill.trained_on]

        def updates() -> bool:
            words = started.words()
            return any(re.search(r" at \d+U\d", each) or each == _AT_THE_END for each in words)

        updated = started.until(updates, 0.005) and _AT_THE_END not in started.words()
        for kill in pending:
            kill.trained_on = updated
        if updated and pending and (self.real or self.how != "--resume"):
            pending[0].seconds = time.monotonic() - pending[0].at
            pending[0].processor = started.processor_seconds() - self.spent.get(
                started.launcher.pid, 0.0
            )

    def _wait_for(self, phase: Phase, started: Started, rank: int) -> bool:
        if phase == "training":
            return self._wait_for_actions(started, rank, self.random.randrange(1, FARTHEST))
        if phase == "saving":
            saving = started.until(lambda: self.run.is_saving(self.name), 0.0005)
            time.sleep(self.random.uniform(0, 0.05))
            return saving
        at_the_end = started.until(lambda: _AT_THE_END in started.words(), 0.001)
        time.sleep(self.random.uniform(0, 1))
        return at_the_end

    def _wait_for_actions(self, started: Started, rank: int, left: int) -> bool:
        words = started.heartbeats.of(rank).words
        while left and alive(started.workers[rank]):
            now = started.heartbeats.of(rank).words
            if now != words:
                words, left = now, left - 1
            time.sleep(0.0003)
        return not left

    def _kill(
        self,
        started: Started,
        victims: Victims,
        phase: Phase,
        ranks: list[int],
        number: signal.Signals,
    ) -> bool:
        ranks = [rank for rank in ranks if alive(started.workers[rank])]
        pids = [started.workers[rank] for rank in ranks]
        if victims in ("the launcher", "all"):
            pids.insert(0, started.launcher.pid)
        if not pids or not alive(pids[0]):
            return False
        words = started.heartbeats.of(ranks[0] if ranks else 0).words
        action = words.partition(" at ")[2].partition("@")[0].partition(",")[0]
        kind = "".join(filter(str.isupper, action))
        kill = Kill(victims, phase, self.how, ranks, number, kind, time.monotonic())
        self.spent[started.launcher.pid] = sum(_processor_times(started.launcher.pid)[:2])
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        self.kills.append(kill)
        if started.launcher.pid in pids:
            started.launcher.wait()
            self._wait_for_orphans(started.workers)
        return True

    def _wait_for_orphans(self, workers: list[int]) -> None:
        deadline = time.monotonic() + _UNTIL_ORPHANS_ARE_GONE
        while any(map(alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.002)


def _processor_times(pid: int) -> list[float]:
    """Seconds of a process on a core, in and below itself, then those of its children."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return [0.0] * 4
    ticks = text.rpartition(")")[2].split()[11:15]
    return [int(tick) / os.sysconf("SC_CLK_TCK") for tick in ticks]
