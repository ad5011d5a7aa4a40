"""The memory of a run with one worker beside what its plan says."""

from __future__ import annotations

from gpu_check.check import Measured, Setting, Skipped
from gpu_check.measures.tools import ONE_WORKER, folder_of, make_plan, summary_of, train


def over_plan(setting: Setting, model: str) -> Measured:
    """Returns by what share of the plan's figure the peak is above it."""
    plan = make_plan(folder_of(setting, model), "plan", *ONE_WORKER)
    (rank,) = summary_of(train(setting, plan, "memory", "--unchecked"))["ranks"]
    peak, planned = rank["peak_memory_bytes"], rank["predicted_memory_bytes"]
    if not planned:
        raise Skipped("the plan has no figure")
    return Measured(peak / planned - 1, f"{peak / 1e9:.3f} GB, planned {planned / 1e9:.3f} GB")
