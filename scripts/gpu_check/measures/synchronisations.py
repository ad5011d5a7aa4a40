"""How often the host waits for the GPU in a minibatch of a run, by torch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_check.check import Measured, Setting
from gpu_check.measures.tools import ONE_WORKER, folder_of, make_plan
from gpu_check.measures.world_of_one import free_port
from pipedream.comm.rank_info import RankInfo
from pipedream.graph.plan import read_plan
from pipedream.graph.run_config import read_config
from pipedream.runtime.run.job import Job
from pipedream.runtime.trainer import train

_WAITS = frozenset(
    {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
)
_FEW, _MORE = 10, 30


def per_minibatch(setting: Setting) -> Measured:
    """Returns how many more there are in a run of more minibatches, for each of these: what a run
    does once, at its beginning and its end, is in both.
    """
    folder = folder_of(setting, "perceptron")
    plan, config = (
        read_plan(make_plan(folder, "plan", *ONE_WORKER)),
        read_config(folder / "run.yaml"),
    )
    job = Job(plan, config, folder, folder, device=setting.device, unchecked=True)
    few, more = (_waits_of(job, folder, count) for count in (_FEW, _MORE))
    each = {name: (more[name] - few[name]) / (_MORE - _FEW) for name in more if more[name]}
    return Measured(sum(each.values()), ", ".join(f"{n:g} {name}" for name, n in each.items() if n))


def _waits_of(job: Job, folder: Path, minibatches: int) -> Counter[str]:
    examples = {"examples": minibatches * job.config.batch_size}
    data = job.config.data.model_copy(update={"args": examples})
    config = job.config.model_copy(update={"data": data})
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as seen:
        run = folder / f"{minibatches} minibatches"
        train(replace(job, config=config, run=run), RankInfo(0, 1, 0, 1, "127.0.0.1", free_port()))
    return waits(event.name for event in seen.events() or ())


def waits(names: Iterable[str]) -> Counter[str]:
    """Counts the calls of CUDA that return only when the GPU has come so far."""
    return Counter(name for name in names if name in _WAITS)
