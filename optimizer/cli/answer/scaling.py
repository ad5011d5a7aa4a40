"""What half and twice the machines would give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import inf

from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.optimizer.cli.answer.rough import rough_choice
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.cli.planning import Planning
from pipedream.optimizer.cli.presets import preset
from pipedream.optimizer.cli.task import Task
from pipedream.optimizer.compare.scaled import Scaled, half_of, twice
from pipedream.optimizer.compare.sweep import shaped
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.sharding.views import of_teams


def scaled_from(planning: Planning) -> tuple[Scaled, ...]:
    """The seconds of a minibatch in a run on half, all and twice the machines: those of the plan,
    scaled as rough plans for these and the others differ. Empty if there is no rough plan to
    compare with, or no other number of machines.
    """
    own, task = planning.task.of_devices.cluster, planning.task
    rough = _rough_seconds(task, own)
    if rough == inf:
        return ()
    seconds = planning.outcome.plan.predicted.seconds_in_a_run
    found = [Scaled(own, seconds, own=True)]
    for cluster in (half_of(own), _twice(own, planning.options)):
        if cluster is not None:
            other = _rough_seconds(task, cluster)
            found.append(Scaled(cluster, None if other == inf else seconds * other / rough))
    return tuple(sorted(found, key=lambda each: each.cluster.devices)) if found[1:] else ()


def _twice(cluster: Cluster, options: Options) -> Cluster | None:
    """Two machines for one, where the cluster is named and its links between machines are known."""
    named = None if options.cluster is None or options.cluster.exists() else options.cluster
    if named is not None and len(cluster.machines) == 1 and str(named).endswith(":1"):
        return preset(f"{str(named)[:-2]}:2")
    return twice(cluster)


def _rough_seconds(task: Task, cluster: Cluster) -> float:
    """Seconds per minibatch, simulated, of the best rough plan; infinite if none fits."""
    best = inf
    for request in _requests(task, cluster):
        with suppress(UserError):
            trial = rough_choice(replace(request, order=None, stages_each=None))
            best = min(best, inf if trial is None else trial.seconds)
    return best


def _requests(task: Task, cluster: Cluster) -> Iterator[Request]:
    """The requests for workers of one device, and for teams as the plan has them."""
    alone = replace(task.of_devices, cluster=cluster)
    yield alone
    for sharding in task.shardings:
        teams = sharding.teams
        same_levels = len(cluster.machines) == len(task.of_devices.cluster.machines)
        scaled = shaped(teams, cluster.devices // sharding.devices) if same_levels else None
        if task.profile is not None and scaled is not None:
            yield replace(of_teams(alone, task.profile, sharding), cluster=scaled)
