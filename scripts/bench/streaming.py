"""How fast several processes read and write memory at once, which virtual machines do not promise.

`python scripts/bench/streaming.py [PROCESSES]` prints it each second, in GB/s for each process.
Updates and layers with large weights take the time that this says.
"""

from __future__ import annotations

import multiprocessing
import sys
import time

import torch

FLOATS = 16_000_000
"""More than fits into a cache."""


def streaming(processes: int, seconds: float = 0.5) -> float:
    """Returns the bytes per second that the slowest of the processes adds to what it has."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return min(pool.map(_stream, [seconds] * processes, chunksize=1))


def _stream(seconds: float) -> float:
    torch.set_num_threads(1)
    sums, numbers = torch.zeros(FLOATS), torch.ones(FLOATS)
    sums.add_(numbers)
    rounds, begun = 0, time.perf_counter()
    while (taken := time.perf_counter() - begun) < seconds:
        sums.add_(numbers)
        rounds += 1
    return 3 * sums.nbytes * rounds / taken


if __name__ == "__main__":
    while True:
        found = streaming(int(sys.argv[1]) if sys.argv[1:] else 2)
        print(f"{time.strftime('%X')} {found / 1e9:.2f}", flush=True)
        time.sleep(1)
