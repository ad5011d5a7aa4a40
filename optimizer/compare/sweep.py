"""Throughput against the number of workers: the planner's plan, data parallelism, the ideal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isnan, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.table import Table

from pipedream.graph.cluster import Cluster, Link
from pipedream.graph.errors import UserError
from pipedream.graph.timeline import png
from pipedream.graph.units import show_seconds
from pipedream.optimizer.choose.chooser import best_plan
from pipedream.optimizer.report.tables import show_meshes, table_of
from pipedream.optimizer.search.outcome import Outcome
from pipedream.optimizer.search.request import Request

if TYPE_CHECKING:
    import pandas as pd

MOST_WORKERS = 1024
"""Planning for one cluster of this size takes seconds; for four times the size, a minute."""

MOST_POINTS = 64
"""The most clusters planned for; more are thinned out geometrically."""


class Point(NamedTuple):
    """A cluster of the sweep and its outcome, None if no plan fits."""

    machines: tuple[int, ...]
    outcome: Outcome | None

    @property
    def workers(self) -> int:
        return prod(self.machines)


def parse_range(text: str) -> range:
    """`1..64`, both ends included. Raises UserError."""
    match = re.fullmatch(r"([0-9]+)\.\.([0-9]+)", text)
    numbers = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if not numbers or numbers[0] < 1 or numbers[-1] > MOST_WORKERS:
        raise UserError(
            f"--sweep {text}: give the fewest and the most workers, such as 1..64, at most"
            f" {MOST_WORKERS}; plan for more on their own, with --machines"
        )
    return numbers


def shaped(cluster: Cluster, workers: int) -> Cluster | None:
    """A cluster of `workers` devices like this one; None if they do not fill it evenly.

    Levels fill from the innermost outwards, each as large as in `cluster`, the outermost as large
    as needed: of 4,2, eight devices are 4,2, sixteen are 4,4 and six are None. Fewer devices than a
    level holds make a smaller level, without those outside. A measured all-reduce or all-gather is
    kept where the level has as many components as when it was measured.
    """
    machines: list[int] = []
    left = workers
    for level, count in enumerate(cluster.machines, start=1):
        if left <= count or level == len(cluster.machines):
            machines.append(left)
            break
        if left % count:
            return None
        machines.append(count)
        left //= count
    levels = len(machines)

    def kept(rings: tuple[Link | None, ...]) -> tuple[Link | None, ...]:
        measured = zip(rings, machines, cluster.machines, strict=False)
        return tuple(
            ring if count == measured_on else None for ring, count, measured_on in measured
        )

    return Cluster(
        machines=tuple(machines),
        bandwidth=cluster.bandwidth[:levels],
        latency=cluster.latency[:levels],
        names=cluster.names[:levels],
        send=cluster.send[:levels],
        all_reduce=kept(cluster.all_reduce),
        all_gather=kept(cluster.all_gather),
        kinds=cluster.kinds,
        machine_kinds=cluster.machine_kinds[:1] * machines[-1],
    )


def check_sweep(cluster: Cluster, numbers: range) -> None:
    """Raises UserError unless at least one of these numbers of workers makes a cluster."""
    if len(set(cluster.machine_kinds)) > 1:
        raise UserError("--sweep is for devices of one kind, and those of --cluster are of several")
    if not any(shaped(cluster, workers) for workers in numbers):
        raise UserError(
            f"--sweep {numbers[0]}..{numbers[-1]}: none of these fills the machines of"
            f" {','.join(map(str, cluster.machines))} evenly: sweep further"
        )


def sweep(
    request: Request, numbers: range, planned: Callable[[Request], Outcome] | None = None
) -> Iterator[Point]:
    """Plans for the clusters of these numbers of workers, at most `MOST_POINTS`. `planned`: how,
    with the simulation noted; by default with workers of one device.

    Raises UserError if none of the numbers makes a cluster.
    """
    check_sweep(request.cluster, numbers)
    clusters = (shaped(request.cluster, workers) for workers in numbers)
    for cluster in thinned([cluster for cluster in clusters if cluster is not None]):
        resized = replace(request, cluster=cluster)
        try:
            outcome = (planned or _planned)(resized)
        except UserError:
            yield Point(cluster.machines, None)
        else:
            yield Point(cluster.machines, outcome)


def _planned(request: Request) -> Outcome:
    outcome = best_plan(request)
    simulation = request.simulate(outcome.plan)
    return (
        outcome if simulation is None else replace(outcome, plan=simulation.noted_in(outcome.plan))
    )


def thinned(clusters: list[Cluster]) -> list[Cluster]:
    """Returns at most `MOST_POINTS` of these growing clusters, nearest to geometric growth."""
    if len(clusters) <= MOST_POINTS:
        return clusters
    sizes = np.array([cluster.devices for cluster in clusters])
    wanted = np.geomspace(sizes[0], sizes[-1], MOST_POINTS)
    nearest = {int(np.abs(sizes - size).argmin()) for size in wanted}
    return [clusters[place] for place in sorted(nearest)]


def sweep_frame(points: list[Point]) -> pd.DataFrame:
    """A row per number of workers; throughputs in minibatches per second."""
    import pandas as pd

    return pd.DataFrame(map(_row, points))


def _row(point: Point) -> dict[str, object]:
    machines = ",".join(map(str, point.machines))
    row: dict[str, object] = {"workers": point.workers, "machines": machines}
    if point.outcome is None:
        return row
    plan, predicted = point.outcome.plan, point.outcome.plan.predicted
    simulated = predicted.simulated
    return row | {
        "stages": len(plan.stages),
        "replicas": " ".join(map(str, plan.replicas)),
        "mesh": show_meshes(plan),
        "seconds_per_minibatch": predicted.seconds_per_minibatch,
        "plan": 1 / predicted.seconds_per_minibatch,
        "plan_simulated": None if simulated is None else 1 / simulated.seconds_per_minibatch,
        "data_parallel": 1 / predicted.data_parallel_seconds,
        "ideal": point.workers / predicted.one_worker_seconds,
    }


def sweep_table(frame: pd.DataFrame) -> Table:
    """The frame for printing, as speedups over one worker."""
    rows = [_cells(row) for row in frame.to_dict("records")]
    if not any(row.get("mesh") for row in rows):
        rows = [{name: row[name] for name in row if name != "mesh"} for row in rows]
    return table_of("Plans for other numbers of workers", "Times as fast as one worker.", rows)


def _cells(row: dict[Any, Any]) -> dict[str, str]:
    cells = {"workers": str(row["workers"]), "machines": row["machines"]}
    if not row.get("stages", 0) > 0:
        return cells | {"": "no plan fits"}
    alone = row["workers"] / row["ideal"]
    headings = {"plan": "plan", "plan_simulated": "simulated", "data_parallel": "data\nparallel"}
    return {
        **cells,
        "stages": f"{row['stages']:.0f}",
        "mesh": row["mesh"],
        "per\nminibatch": show_seconds(row["seconds_per_minibatch"]),
        **{
            heading: "-" if isnan(row[name]) else f"{row[name] * alone:.2f}"
            for name, heading in headings.items()
        },
    }


def sweep_png(frame: pd.DataFrame) -> bytes:
    """Draws minibatches per second against workers (PNG)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    axes = figure.add_subplot()
    lines = (
        ("ideal", "ideal", {"color": "#999999", "linestyle": "--"}),
        ("plan", "plan", {"color": "#0072B2", "marker": "o", "markersize": 4}),
        ("plan_simulated", "plan, simulated", {"color": "#56B4E9", "marker": ".", "linewidth": 1}),
        ("data_parallel", "data parallelism", {"color": "#E69F00", "marker": "s", "markersize": 3}),
    )
    for column, label, style in lines:
        if column in frame and frame[column].notna().any():
            axes.plot(frame["workers"], frame[column], label=label, **style)
    axes.set_xlabel("workers")
    axes.set_ylabel("minibatches per second")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:  # none where no plan fits
        axes.legend(frameon=False)
    return png(figure, 110)
