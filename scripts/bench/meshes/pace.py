"""How fast the cores of this machine are at a time, whatever else they do.

A virtual core shares a real one with others: of two, each drifts by a tenth within seconds, and by
a third within minutes. Then a profile and a run differ by that, whatever was planned. So a process
on each core multiplies two small matrices, for half a millisecond five times a second, and notes
the processor time that it takes: 21 us where nobody shares the core, up to 40 us else.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SIZE, REPEATS = 128, 12
"""Of matrices that fit into the nearest caches; the first half of the repeats brings them there."""
PAUSE = 0.2


@dataclass(frozen=True)
class Pace:
    """The files in which a process on each core notes (when, seconds)."""

    files: tuple[Path, ...]

    def seconds(self, begin: float, end: float) -> float:
        """Returns the mean over the cores of what the product took between these times, by the
        monotonic clock.
        """
        of_cores = []
        for file in self.files:
            noted = [tuple(map(float, line.split())) for line in file.read_text().splitlines()]
            of_cores.append(statistics.fmean(took for at, took in noted if begin <= at <= end))
        return statistics.fmean(of_cores)


@contextmanager
def pace(folder: Path) -> Iterator[Pace]:
    """Watches all cores that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    files = tuple(folder / f"pace-{core}.txt" for core in cores)
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, __file__]
    running = []
    for core, file in zip(cores, files, strict=True):
        with file.open("w") as noted:
            running.append(subprocess.Popen([*words, str(core)], stdout=noted))
    try:
        yield Pace(files)
    finally:
        for each in running:
            each.kill()
            each.wait()


def _watch(core: int) -> None:
    import torch

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    one = torch.rand(SIZE, SIZE)
    while True:
        time.sleep(PAUSE)
        taken = []
        for _ in range(REPEATS):
            begun = time.thread_time()
            one @ one
            taken.append(time.thread_time() - begun)
        print(time.monotonic(), statistics.median(taken[REPEATS // 2 :]), flush=True)


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
