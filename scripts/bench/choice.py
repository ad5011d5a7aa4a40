"""How good the plans are that pd-optimize chooses by simulation, and how long choosing takes.

    python scripts/bench/choice.py [--folder PROFILES ...] [--only NAME ...] [--random N]

For every profile PROFILES/NAME/graph.txt (default: those of the repository) on clusters of 8 and 16
devices at 1 GB/s and of 4,2, 4,4 and 8,4 at 10 and 1 GB/s: the chosen plan, simulated, beside the
best of data parallelism, a straight pipeline and the plans of the formulas; its closed form and
that of data parallelism and of the straight pipeline beside what is simulated; how far it can be
from the best; by how much its time changes when all passes change by 2 % at random; and seconds.

With `--random N` instead: so many random graphs of up to 8 nodes on 2 to 6 devices, beside the best
of all nested cuts and replica counts.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from pipedream.graph.choices import ScheduleName
from pipedream.graph.cluster import Cluster
from pipedream.graph.model import Graph, Node, read_graph
from pipedream.optimizer.choose.candidates import candidates
from pipedream.optimizer.choose.chooser import choose
from pipedream.optimizer.choose.placed_trials import PlacedTrials
from pipedream.optimizer.cost.models import NetworkCost
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulator import simulate_plan

sys.path.append(str(Path(__file__).parents[2] / "tests" / "optimizer" / "support"))
from divisions import every_division

CLUSTERS = {
    "8": Cluster(machines=(8,), bandwidth=(1e9,)),
    "16": Cluster(machines=(16,), bandwidth=(1e9,)),
    "4,2": Cluster(machines=(4, 2), bandwidth=(1e10, 1e9)),
    "4,4": Cluster(machines=(4, 4), bandwidth=(1e10, 1e9)),
    "8,4": Cluster(machines=(8, 4), bandwidth=(1e10, 1e9)),
}
SCHEDULES: tuple[ScheduleName, ...] = ("weight-stashing", "weight-stashing", "flush", "2bw")
_DRAWS = 5


def measured(name: str, graph: Graph, cluster: Cluster) -> dict[str, float | str]:
    """The figures of one profile on one cluster, times in seconds."""
    request = Request(graph, cluster, NetworkCost())
    begin = time.perf_counter()
    plan = choose(request).plan
    taken = time.perf_counter() - begin
    assert plan.predicted.simulated is not None
    chosen = plan.predicted.simulated.seconds_per_minibatch
    trials = PlacedTrials(request)
    others = {
        label: trial
        for label, division in candidates(request)
        if (trial := trials.settle(division)) is not None and trial.fits
    }
    simple = [others[label] for label in ("data parallelism", "straight pipeline")]
    worst = max(
        abs(each.plan.predicted.seconds_per_minibatch / each.seconds - 1) for each in simple
    )
    noisy = []
    for seed in range(_DRAWS):
        changed = simulate_plan(plan, _changed(graph, 0.02, seed))
        assert changed is not None
        noisy.append(abs(changed.seconds_per_minibatch / chosen - 1))
    return {
        "profile": name,
        "replicas": " ".join(map(str, plan.replicas)),
        "chosen": chosen,
        "best candidate": min(each.seconds for each in others.values()),
        "bound": plan.predicted.lower_bound_seconds,
        "closed form": plan.predicted.seconds_per_minibatch / chosen - 1,
        "of simple plans": worst,
        "passes +-2 %": max(noisy),
        "seconds": taken,
    }


def _changed(graph: Graph, share: float, seed: int) -> Graph:
    """The graph with every pass longer or shorter by up to this share."""
    draw = np.random.default_rng(seed)
    return graph.with_nodes(
        replace(
            node,
            forward_seconds=node.forward_seconds * draw.uniform(1 - share, 1 + share),
            backward_seconds=node.backward_seconds * draw.uniform(1 - share, 1 + share),
        )
        for node in graph.nodes.values()
    )


def random_graph(draw: random.Random) -> Graph:
    """2 to 8 nodes in any shape, some of them free, some without parameters."""
    count = draw.randint(2, 8)
    pairs = [(a, b) for b in range(count) for a in range(max(0, b - 4), b)]
    edges = {(b - 1, b) for b in range(1, count) if draw.random() < 0.8}
    edges.update(draw.sample(pairs, draw.randint(0, min(len(pairs), count))))
    nodes = {
        f"n{i}": Node(
            id=f"n{i}",
            description=f"Layer{i}",
            forward_seconds=draw.randint(0, 9) * 1e-3,
            backward_seconds=draw.randint(0, 9) * 1e-3,
            activation_bytes=(draw.randint(0, 9) * 1e5,),
            parameter_bytes=draw.randint(0, 9) * 1e6,
        )
        for i in range(count)
    }
    return Graph(nodes, tuple((f"n{a}", f"n{b}") for a, b in sorted(edges)))


def against_all(seed: int) -> tuple[float, float, float]:
    """Of a random case: seconds per minibatch chosen, of the best division, and by the bound."""
    draw = random.Random(seed)
    graph = random_graph(draw)
    cluster = Cluster(machines=(draw.randint(2, 6),), bandwidth=(draw.choice([1e9, 2e8, 1e8]),))
    request = Request(graph, cluster, NetworkCost(), draw.choice(SCHEDULES))
    predicted = choose(request).plan.predicted
    assert predicted.simulated is not None
    chosen = best = predicted.simulated.seconds_per_minibatch
    trials = PlacedTrials(request)
    for division in every_division(request.planning, cluster.devices):
        trial = trials.try_out(division, within=best)
        if trial is not None:
            best = min(best, trial.seconds)
    return chosen, best, predicted.lower_bound_seconds


def _cases(folders: tuple[Path, ...], only: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    for folder in folders:
        for path in sorted(folder.glob("*/graph.txt")):
            if not only or path.parent.name in only:
                yield path.parent.name, path


@click.command(help=__doc__.replace("\n\n", "\n\n\b\n", 1))
@click.option("--folder", "folders", type=click.Path(path_type=Path), multiple=True)
@click.option("--only", multiple=True)
@click.option("--random", "count", type=int, default=0)
@click.option("--first", type=int, default=0, help="Seed of the first random graph.")
def main(folders: tuple[Path, ...], only: tuple[str, ...], count: int, first: int) -> None:
    if count:
        _random(range(first, first + count))
        return
    folders = folders or (Path(__file__).parents[2] / "profiles",)
    columns = ("chosen", "best candidate", "bound")
    rows = []
    table = Table(title="Milliseconds per minibatch, simulated")
    for name, path in _cases(folders, only):
        graph = read_graph(path)
        for label, cluster in CLUSTERS.items():
            row = measured(name, graph, cluster)
            rows.append(row)
            cells = [f"{1e3 * float(row[column]):.2f}" for column in columns]
            shares = ("closed form", "of simple plans", "passes +-2 %")
            cells += [f"{float(row[column]):+.1%}" for column in shares]
            if not table.columns:
                for heading in ("profile", "devices", "replicas", *columns, *shares, "seconds"):
                    table.add_column(heading)
            table.add_row(name, label, str(row["replicas"]), *cells, f"{row['seconds']:.1f}")
            print(name, label, *cells, f"{row['seconds']:.1f} s", flush=True)
    Console(width=150).print(table)
    slower = sum(float(r["chosen"]) > float(r["best candidate"]) * (1 + 1e-9) for r in rows)
    print(f"{len(rows)} cases, the chosen plan slower than a candidate in {slower}")
    for column in ("closed form", "of simple plans", "passes +-2 %"):
        sizes = sorted(abs(float(row[column])) for row in rows)
        print(f"{column}: median {sizes[len(sizes) // 2]:.1%}, worst {sizes[-1]:.1%}")


def _random(seeds: range) -> None:
    near = beaten = 0
    for seed in seeds:
        chosen, best, bound = against_all(seed)
        near += chosen <= best * 1.02
        beaten += best < bound * (1 - 1e-9)
        if chosen > best * 1.02:
            print(f"seed {seed}: {1e3 * chosen:.3f} ms chosen, {1e3 * best:.3f} the best")
    print(f"within 2 % of the best in {near} of {len(seeds)}; the bound beaten in {beaten}")


if __name__ == "__main__":
    main()
