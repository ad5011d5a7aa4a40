"""The speed of pd-train's engine with one worker beside a plain training loop."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from gpu_check.check import Measured, Setting
from gpu_check.measures.tools import ONE_WORKER, folder_of, make_plan

_BENCHMARKS = Path(__file__).parents[2] / "bench"
_TURNS = 5


def efficiency(setting: Setting, model: str) -> Measured:
    """Returns the seconds of a minibatch in the loop over those in the engine, in turns."""
    folder = folder_of(setting, model)
    make_plan(folder, "plan", *ONE_WORKER)
    sys.path.append(str(_BENCHMARKS))
    from one_worker import Bench

    bench = Bench(folder, setting.device)
    turns = 1 if setting.small else _TURNS
    pairs = [bench.pair() for _ in range(turns + 1)][1:]  # the first is to warm up
    loop, engine = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(before / after for before, after in pairs)
    return Measured(ratio, f"loop {loop * 1e3:.2f} ms, engine {engine * 1e3:.2f} ms")
