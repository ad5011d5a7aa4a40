"""What planning on groups of operators costs, and what it saves.

    python scripts/bench/groups/planning.py FOLDER... [--clusters 4/1GB ...]

Each FOLDER has a graph.txt. Prints nodes and groups, the ways to cut between each, and for each
cluster (machines, slash, bandwidths) how long whole pd-optimize processes plan with `--group none`
and `fusion`, and `module` where there is a profile.json, and how much longer a minibatch takes by
the plans of groups: as simulated where plans are chosen by that, else by the formula of the cost
model.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pandas as pd

from pipedream.graph.model import read_graph
from pipedream.graph.plan import Plan, read_plan
from pipedream.graph.profile import read_profile
from pipedream.optimizer.cost.models import COST_MODELS
from pipedream.optimizer.cuts.antichains import depth_first
from pipedream.optimizer.cuts.groups import classes_of, fusion_groups, whole_modules
from pipedream.optimizer.cuts.planning_graph import PlanningGraph

CLUSTERS = ("4/1GB", "4,4/10GB,1GB")


@click.command()
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
@click.option("--clusters", multiple=True, default=CLUSTERS, show_default=True)
@click.option("--cost-model", default="network", show_default=True)
def main(folders: tuple[Path, ...], clusters: tuple[str, ...], cost_model: str) -> None:
    table = []
    for row in rows(folders, clusters, cost_model):
        table.append(row)
        print(*row.values(), sep=" | ", flush=True)
    print(f"\n{pd.DataFrame(table).to_string(index=False)}")


def rows(
    folders: tuple[Path, ...], clusters: tuple[str, ...], cost_model: str
) -> Iterator[dict[str, object]]:
    for folder in folders:
        graph = read_graph(folder / "graph.txt")
        plain = PlanningGraph.of(graph)
        ways = {"fusion": fusion_groups(plain, classes_of(graph, None))}
        if (folder / "profile.json").exists():
            modules = read_profile(folder / "profile.json").modules
            ways["module"] = whole_modules(plain, modules)
        graphs = {how: PlanningGraph.of(graph, groups=groups) for how, groups in ways.items()}
        counted = {how: cuts(each) for how, each in ({"none": plain} | graphs).items()}
        for cluster in clusters:
            single, before = planned(folder, cluster, cost_model, "none")
            for how, of_groups in graphs.items():
                grouped, after = planned(folder, cluster, cost_model, how)
                seconds = seconds_of(single), seconds_of(grouped)
                yield {
                    "model": folder.name,
                    "nodes": len(plain),
                    "of": how,
                    "groups": len(of_groups),
                    "cuts": counted["none"],
                    "of groups": counted[how],
                    "cluster": cluster,
                    "none": f"{before:.1f} s",
                    "took": f"{after:.1f} s",
                    "longer": f"{100 * (seconds[1] / seconds[0] - 1):+.2f} %",
                }


def seconds_of(plan: Plan) -> float:
    """Of a minibatch, by what chose the plan."""
    predicted = plan.predicted
    if predicted.simulated is None or not COST_MODELS[predicted.cost_model](None).prices_plans:
        return predicted.seconds_per_minibatch
    return predicted.simulated.seconds_per_minibatch


def cuts(graph: PlanningGraph, most: int = 300_000) -> str:
    """The number of downsets: decides node by node whether it is before the cut, and remembers that
    of nodes that are still to be read. Where there are more than `most` ways to remember, as in a
    scan that is written out step by step, the number up to there: there are more.
    """
    order = depth_first(graph)
    place = {node: number for number, node in enumerate(order)}
    last = [max((place[c] for c in graph.consumers[n]), default=-1) for n in range(len(graph))]
    ways = Counter({0: 1})
    for number, node in enumerate(order):
        read, unread = graph.producer_masks[node], 0
        for other, when in enumerate(last):
            unread |= (when <= number) << other
        decided: Counter[int] = Counter()
        for before, count in ways.items():
            decided[before & ~unread] += count
            if not read & ~before:
                decided[(before | 1 << node) & ~unread] += count
        ways = decided
        if len(ways) > most:
            return f">{sum(ways.values()):.3g}"
    return f"{sum(ways.values()):.3g}"


def planned(folder: Path, cluster: str, cost_model: str, group: str) -> tuple[Plan, float]:
    """The plan, and the seconds of the process."""
    machines, bandwidth = cluster.split("/")
    with tempfile.TemporaryDirectory(prefix="bench-") as out:
        program = Path(sys.executable).with_name("pd-optimize")
        words = [program, folder / "graph.txt", "--machines", machines, "--bandwidth", bandwidth]
        words += ["--cost-model", cost_model, "--group", group, "--intra-op", "none", "-o", out]
        begun = time.perf_counter()
        subprocess.run(list(map(str, words)), check=True, stdout=subprocess.DEVNULL)
        return read_plan(Path(out) / "plan.json"), time.perf_counter() - begun


if __name__ == "__main__":
    main()
