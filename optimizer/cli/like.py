"""Planning as before (`--like`, `--calibrate`): the options of an earlier plan, and what is left of
its cluster.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from pipedream.graph.cluster import Cluster
from pipedream.graph.measured_run import MEASURED
from pipedream.graph.plan import Plan, PlanningOptions
from pipedream.optimizer.calibrate.runs import CalibrationRun
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.compare.sweep import shaped

_AS_TYPED = set(PlanningOptions.model_fields) - {"profile"}


def recorded_options(options: Options, profile_used: bool) -> PlanningOptions:
    """The options for plan.json to record; the profile, if used, relative to the plan's folder."""
    typed: dict[str, Any] = {name: getattr(options, name) for name in _AS_TYPED}
    typed["shard"] = options.shard or None
    return PlanningOptions(**typed, profile=_recorded_profile(options) if profile_used else None)


def _recorded_profile(options: Options) -> str | None:
    """Returns its path: absolute if the plan is for no folder, None if the profile is in memory."""
    if options.profile is None and not isinstance(options.graph, Path):
        return None
    path = options.profile_path.resolve()
    return str(path) if options.output is None else os.path.relpath(path, options.output.resolve())


def options_of(plan: Plan, path: Path) -> dict[str, Any]:
    """Returns the options of the plan in `path`, by Python name, without its cluster."""
    known, places = plan.asked or PlanningOptions(), max(plan.rank_map) + 1
    return {
        **known.model_dump(include=_AS_TYPED),
        "profile": None if known.profile is None else str(path.parent / known.profile),
        "cost_model": plan.predicted.cost_model,
        "schedule": plan.schedule,
        "order": plan.order,
        "stages_per_rank": None if plan.order is None else len(plan.stages) // places,
        "optimizer": plan.optimizer,
        **dict.fromkeys(plan.corrections or (), True),
        "objective": plan.predicted.objective,
        "microbatches": plan.predicted.microbatches,
    }


def options_after(run: CalibrationRun) -> dict[str, Any]:
    """The options of the run's plan, with the measured update rate; without a missing profile."""
    known = options_of(run.measured.plan, run.folder / MEASURED)
    if run.update_rate is not None:
        known["update_rate"] = f"{run.update_rate:.4g}"
    if known["profile"] is not None:
        profile = Path(known["profile"]).resolve()
        known["profile"] = os.path.relpath(profile) if profile.exists() else None
    return {name: value for name, value in known.items() if value is not None}


def remaining(cluster: Cluster, workers: int) -> Cluster:
    """The cluster of `workers` of these devices, at most as many as there are.

    A count that does not fill the levels evenly becomes one level with the links of the outermost:
    of 4,2 seven devices become 7, six become 6, four become 4. Device types are those of the first
    devices, since the number of remaining processes does not say which devices are gone.
    """
    small = shaped(cluster, workers) or _flat(cluster, workers)
    if not cluster.kinds:
        return small
    inner = math.prod(small.machines[:-1])
    firsts = range(0, workers, inner)
    kinds = tuple(cluster.machine_kinds[cluster.machine(first)] for first in firsts)
    return small.model_copy(update={"kinds": cluster.kinds, "machine_kinds": kinds})


def _flat(cluster: Cluster, workers: int) -> Cluster:
    return Cluster(
        machines=(workers,),
        bandwidth=cluster.bandwidth[-1:],
        latency=cluster.latency[-1:],
        names=cluster.names[-1:],
        send=cluster.send[-1:],
    )
