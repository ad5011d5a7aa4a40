"""A plan trained by pd-train on the emulated network."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import sleeping_model
from emulated_model import EmulatedModel
from forked import Ended, run_ranks
from launched import launch
from network import EmulatedNetwork
from trial import Trial

import pipedream.runtime.trainer  # noqa: F401 - so that the processes need not import it
from pipedream.comm.buckets import Buckets
from pipedream.graph.cluster import Cluster
from pipedream.graph.measured_run import MEASURED, read_measured
from pipedream.graph.plan import write_plan
from pipedream.runtime.cli import main as pd_train
from pipedream.runtime.engine import executor
from pipedream.runtime.local import captures
from pipedream.runtime.report.recording import read_trace
from pipedream.schedule.steady_state import steady_window


@dataclass(frozen=True)
class TrainedRun:
    """What was measured.

    `seconds_per_minibatch`: in the steady state. `excess`: how much longer than wanted the passes
    of a minibatch took, as a share; `worst_excess`: what one stage adds to that. `cores`: kept busy
    by the ranks, in the mean over the whole run; `machine_cores`: by all programs and by the
    kernel, which moves the packets.
    """

    seconds_per_minibatch: float
    excess: float
    worst_excess: float
    cores: float
    machine_cores: float


class RunFailed(RuntimeError):
    """A run did not end well; says why."""


def train(
    model: EmulatedModel, trial: Trial, cluster: Cluster, folder: Path, seconds: float
) -> TrainedRun:
    """Trains the plan of `trial` on the emulated `cluster` for at most `seconds`.

    What pd-train writes is in the folder `run` of `folder`, which is made anew. Raises RunFailed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_plan(trial.plan, folder / "plan.json")
    config = model.run_config(trial.span.minibatches, trial.microbatches)
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    busy = _busy_seconds()
    with closing(EmulatedNetwork(cluster)) as network:
        body = partial(_be_rank, model, trial, network, folder, seconds)
        ended = run_ranks(trial.plan.workers, body, folder, seconds)
    if any(ended.codes):
        raise RunFailed(_why(ended, folder, seconds))
    excess, worst_excess = _excess(trial, folder / "run" / MEASURED)
    return TrainedRun(
        _seconds_per_minibatch(trial, folder / "run" / "timeline.csv"),
        excess,
        worst_excess,
        ended.cpu_seconds / ended.seconds,
        (_busy_seconds() - busy) / ended.seconds,
    )


def _be_rank(
    model: EmulatedModel,
    trial: Trial,
    network: EmulatedNetwork,
    folder: Path,
    seconds: float,
    process: int,
) -> int:
    """Runs pd-train as torchrun would start it, and returns its exit code.

    It takes the model that has been captured, and adds up gradients in buckets of the scale.
    """
    used = sorted({rank for stage in trial.plan.stages for rank in stage.ranks})
    launch(network, process, used)
    own = next(stage for stage in trial.plan.stages if used[process] in stage.ranks)
    layers = [number for number, name in enumerate(model.layers) if name in own.nodes]
    sleeping_model.pace.begin(layers[0], layers[-1])
    arguments = [folder / "plan.json", "--config", folder / "config.yaml", "-o", folder / "run"]
    words = [*map(str, arguments), "--no-evaluate", "--timeout", str(seconds)]
    buckets = partial(Buckets, most_bytes=model.bucket_bytes)
    with (
        patch.object(captures, "capture", return_value=model.captured),
        patch.object(executor, "Buckets", buckets),
    ):
        return int(pd_train(words, standalone_mode=False) or 0)


def _why(ended: Ended, folder: Path, seconds: float) -> str:
    """In one line."""
    if ended.late:
        return f"not done after {seconds:g} s"
    failed = [rank for rank, code in enumerate(ended.codes) if code > 0] or [0]
    said = (folder / f"rank{failed[0]}.log").read_text(encoding="utf-8").strip()
    return f"exit codes {ended.codes}, rank {failed[0]}: {said.splitlines()[-1] if said else ''}"


def _excess(trial: Trial, path: Path) -> tuple[float, float]:
    """Seconds by which passes took longer than wanted, over those of a minibatch on its way through
    the pipeline: of all stages together, and of the stage that is farthest off.
    """
    run = read_measured(path)
    wanted = [work.forward_seconds + work.backward_seconds for work in trial.workload.stages]
    taken = [
        fmean(rank.forward.median + rank.backward.median for rank in run.of_stage(stage))
        for stage in range(len(wanted))
    ]
    excess = [took - want for took, want in zip(taken, wanted, strict=True)]
    return sum(excess) / sum(wanted), max(excess, key=abs) / sum(wanted)


def _seconds_per_minibatch(trial: Trial, path: Path) -> float:
    """As the simulator has it."""
    begin, end = steady_window(read_trace(path), trial.span)
    return (end - begin) / len(trial.span)


def _busy_seconds() -> float:
    """Of all cores since the machine was started."""
    user, nice, system, _, _, interrupts, soft = map(
        int, Path("/proc/stat").read_text(encoding="ascii").split()[1:8]
    )
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")
