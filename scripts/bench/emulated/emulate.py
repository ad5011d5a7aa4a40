"""Are plans as fast as simulated, and the chosen ones the best? On emulated clusters.

    python scripts/bench/emulated/emulate.py OUT [--profiles vgg16,resnet50] [--clusters 8,4x2] ...

For each profile and cluster makes plans with pd-optimize's code and trains each with pd-train's own
main, on devices that are network namespaces, over links with a rate, in layers that sleep: many
workers share few cores, and what is real are the schedule, the messages and the runtime. Prints
milliseconds of the profile per minibatch: closed form, simulated, measured. Writes
OUT/results.jsonl; what is in there is not run again. Each run has a folder in OUT with its plan,
logs, timeline and measured times. Needs root. Linux ends all of it with this process.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from emulated_model import EmulatedModel
from measured_cluster import measure_cluster
from network import EmulatedNetwork
from plans import MAKERS, equal, make_plan
from results import Case, Results, show
from training import RunFailed, TrainedRun, train
from trial import Trial

from pipedream.graph.cluster import Cluster
from pipedream.graph.errors import UserError
from pipedream.graph.units import parse_bytes
from pipedream.optimizer.cost import models
from pipedream.optimizer.report.tables import show_replicas
from pipedream.optimizer.simulate import workload

PROFILES = Path(__file__).parents[3] / "profiles"
INNER = 10
"""How many times as fast as the links outside are those within a machine."""


class Comparison:
    """Plans for profiles and clusters, each trained several times.

    `gigabyte`: bytes per second that stand for 1 GB/s; `seconds`: about how long a run trains;
    `seconds_limit`: when it is given up; `within`: a plan that is simulated to take more than so
    many times as long as the fastest is left out. With `measured_network`, plans are for the links
    as pd-profile measures them.
    """

    def __init__(
        self,
        out: Path,
        gigabyte: float,
        seconds: float,
        seconds_limit: float,
        within: float,
        measured_network: bool,
    ) -> None:
        self.within = within
        self.out, self.gigabyte, self.measured_network = out, gigabyte, measured_network
        self.seconds, self.seconds_limit = seconds, seconds_limit
        self.results = Results(out / "results.jsonl")

    def compare(
        self, model: EmulatedModel, cluster_name: str, names: Sequence[str], repeat: int
    ) -> None:
        """Trains the plans of these names in turns: what slows this machine for a while slows all
        of them. Planner and simulator, too, have buckets of the scale.
        """
        with (
            patch.object(workload, "BUCKET_BYTES", model.bucket_bytes),
            patch.object(models, "BUCKET_BYTES", model.bucket_bytes),
        ):
            self._compare(model, cluster_name, names, repeat)

    def _compare(
        self, model: EmulatedModel, cluster_name: str, names: Sequence[str], repeat: int
    ) -> None:
        every = [Case(model.name, cluster_name, n, r) for r in range(repeat) for n in names]
        cases = [case for case in every if self.results.of(case) is None]
        if not cases:
            return
        cluster = known = _cluster(cluster_name, self.gigabyte)
        if self.measured_network:
            known = measure_cluster(cluster, self.out / f"network-{cluster_name}")
        plans = {name: make_plan(name, model.graph, known) for name in names}
        trials = {name: Trial(model.graph, plan, self.seconds) for name, plan in plans.items()}
        most = self.within * min(trial.predicted_seconds for trial in trials.values())
        for case in cases:
            trial, plan = trials[case.plan], plans[case.plan]
            if trial.predicted_seconds > most:
                continue
            alike = (name for name in names if equal(plans[name], plan))
            rows = (self.results.of(case._replace(plan=name)) for name in alike)
            row = next((row for row in rows if row is not None), None)
            measured = self._train(case, trial, model, cluster) if row is None else _taken_from(row)
            self.results.add(case, _predicted(trial, model) | measured)
            click.echo(show(self.results.row(case), header=False))

    def _train(
        self, case: Case, trial: Trial, model: EmulatedModel, cluster: Cluster
    ) -> dict[str, Any]:
        try:
            run = train(model, trial, cluster, self.out / case.folder, self.seconds_limit)
        except RunFailed as failure:
            return {"problem": str(failure)}
        milliseconds = run.seconds_per_minibatch * 1e3 / model.time_scale
        return {"measured_ms": milliseconds, **asdict(run)}


def _taken_from(row: dict[str, Any]) -> dict[str, Any]:
    """What was measured of an equal plan."""
    names = ["measured_ms", "problem", *(field.name for field in fields(TrainedRun))]
    return {"equal_to": row["plan"]} | {name: row[name] for name in names if name in row}


def _predicted(trial: Trial, model: EmulatedModel) -> dict[str, Any]:
    """What is known of a case without training, times in milliseconds of the profile."""
    plan, scale = trial.plan, 1e3 / model.time_scale
    return {
        "stages": show_replicas(plan.replicas),
        "schedule": plan.schedule,
        "in_flight": plan.max_in_flight,
        "minibatches": trial.span.minibatches,
        "closed_ms": plan.predicted.seconds_shared_out * scale,
        "predicted_ms": trial.predicted_seconds * scale,
        "simulated_ms": trial.simulate().seconds_per_minibatch * scale,
    }


def _cluster(name: str, gigabyte: float) -> Cluster:
    """`4x2`: two machines of four devices. 1 GB/s outside, ten times as much within; `8@0.25`:
    eight with a quarter of that.
    """
    try:
        shape, _, share = name.partition("@")
        machines = tuple(map(int, shape.split("x")))
        outside = gigabyte * float(share or 1)
        speeds = [outside * INNER**level for level in reversed(range(len(machines)))]
        return Cluster(machines=machines, bandwidth=tuple(speeds))
    except ValueError:
        raise UserError(
            f"--clusters {name}: write 8, 4x2 for two machines of four, or 8@0.25 for slower links"
        ) from None


def _listed(allowed: Collection[str] | None = None) -> Callable[..., list[str]]:
    """A callback for an option that is a list of names, separated by commas."""

    def check(_context: click.Context, option: click.Parameter, text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if allowed is not None and name not in allowed:
                known = ", ".join(allowed)
                raise UserError(f"{option.opts[0]}: there is no {name!r}; known: {known}")
        return names

    return check


def _amount(_context: click.Context, option: click.Parameter, text: str) -> float:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UserError(f"{option.opts[0]}: {error}") from None


@click.command()
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=PROFILES,
    help="Where the profiles are, each as NAME/graph.txt.  [default: profiles]",
)
@click.option("--profiles", default="vgg16,resnet50,gnmt", callback=_listed(), show_default=True)
@click.option("--clusters", default="8,16", callback=_listed(), show_default=True)
@click.option("--plans", default=",".join(MAKERS), callback=_listed(MAKERS), show_default=True)
@click.option("--repeat", default=3, show_default=True, help="Runs of each plan.")
@click.option("--seconds", default=60.0, show_default=True, help="How long a run trains, about.")
@click.option("--seconds-limit", default=240.0, show_default=True, help="When it is given up.")
@click.option(
    "--within",
    default=2.0,
    show_default=True,
    help="Leave out plans simulated to take more than so many times as long as the fastest.",
)
@click.option("--measured-network", is_flag=True, help="Plan with pd-profile --network.")
@click.option(
    "--minibatch-seconds",
    default=2.0,
    show_default=True,
    help="What a minibatch takes on one device: more if the cores are too busy.",
)
@click.option(
    "--gigabyte",
    default="2.5MB",
    callback=_amount,
    show_default=True,
    help="Bytes per second that stand for 1 GB/s: less if the cores are too busy.",
)
def main(
    out: Path,
    folder: Path,
    profiles: list[str],
    clusters: list[str],
    plans: list[str],
    repeat: int,
    seconds: float,
    seconds_limit: float,
    within: float,
    measured_network: bool,
    minibatch_seconds: float,
    gigabyte: float,
) -> None:
    """Compares plans on emulated clusters; results go to OUT."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: sys.exit(128 + got))
    EmulatedNetwork(Cluster(machines=(2,), bandwidth=(gigabyte,))).close()  # or an early error
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    comparison = Comparison(out, gigabyte, seconds, seconds_limit, within, measured_network)
    for cluster in clusters:
        for name in profiles:
            path = folder / name / "graph.txt"
            model = EmulatedModel.of(path, minibatch_seconds, gigabyte)
            comparison.compare(model, cluster, plans, repeat)
    click.echo(show(comparison.results.table()))
    click.echo("\n".join(comparison.results.summary()))


if __name__ == "__main__":
    main()
