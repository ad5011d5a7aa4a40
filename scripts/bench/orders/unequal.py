"""Is `auto` worth it where stages are unequal? `python scripts/bench/orders/unequal.py [M]`

Four stages of 4, 2, 3 and 7 of 16 equal layers on two processes, in a loop: interleaved 1F1B, and
the order found for the times of the passes, which are measured first. Rounds of M microbatches
[default: 2] in turns within the same two processes; medians, on the slower rank, and what the order
should take by the times of its passes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from divided import MODELS, captured_model, planned
from ours import Ours, pass_times, update_seconds

from pipedream.capture.compute_settings import keep_freed_memory
from pipedream.schedule.orders.literature import loop
from pipedream.schedule.orders.named import round_of
from pipedream.schedule.orders.timing import Timing

NAME, NAMED, FOUND = "unequal", "interleaved", "auto"
ROUNDS, SECONDS = 4, 40.0


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    microbatches = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        mp.spawn(work, (microbatches, folder), nprocs=2)


def work(rank: int, microbatches: int, folder: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    captured = captured_model(NAME)
    ours = Ours(NAME, rank, Path(folder), planned(MODELS[NAME], captured, NAMED, loop(2, 2)))
    untimed = ours.spec(FOUND, microbatches)
    for _ in range(4):
        ours.rounds(untimed, ROUNDS)
    times = pass_times(ours.of_all_stages(FOUND), untimed)
    specs = {
        NAMED: ours.spec(NAMED, microbatches),
        FOUND: ours.spec(FOUND, microbatches, times),
    }
    ours.clocked.clear()
    spans: dict[str, list[float]] = {order: [] for order in specs}
    end, goes_on = time.monotonic() + SECONDS, [True]
    while goes_on[0]:
        for order, spec in specs.items():
            both: list[list[float]] = [[], []]
            dist.all_gather_object(both, ours.rounds(spec, ROUNDS))
            spans[order] += [max(pair) for pair in zip(*both, strict=True)]
        goes_on = [time.monotonic() < end]
        dist.broadcast_object_list(goes_on)
    measured = {order: float(np.median(each)) for order, each in spans.items()}
    clocked = {order: ours.of_all_stages(order) for order in specs}
    if rank == 0:
        for order, spec in specs.items():
            timed = ours.spec(order, microbatches, pass_times(clocked[order], spec))
            order_passes = round_of(spec, microbatches)
            timing = Timing(timed, chain.from_iterable(order_passes))
            expected, _, _ = timing.seconds_of_round(timing.numbers(order_passes))
            expected += update_seconds(clocked[order], spec.places)
            print(f"{order:12} {1e3 * measured[order]:7.1f} ms, expected {1e3 * expected:7.1f} ms")
        print(f"{NAMED} over {FOUND}: {measured[NAMED] / measured[FOUND]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
