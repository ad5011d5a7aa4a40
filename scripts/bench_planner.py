"""How long pd-optimize plans, whole processes, and how close to the best possible it comes.

    python scripts/bench_planner.py -o runs/planner [--published FOLDER]

Transformers of 100 to 10,000 nodes, with the side branches of attention and residual connections,
on 64 devices; then the largest on 8 to 4,096 devices, and on as many in one to four levels. With
`--published`, the profiles FOLDER/profiles/NAME/graph.txt too, beside what FOLDER/expected.json has
of the released optimizer. Prints tables, writes planner.csv and planner.png.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import matplotlib.pyplot as plt
import pandas as pd

from pipedream.graph.model import Graph, Node
from pipedream.graph.text import format_graph

BANDWIDTH = ("300GB", "100GB", "25GB", "10GB")
HIDDEN, LENGTH = 4096, 2048

# Operator, forward milliseconds, outputs and parameters in units of the hidden state and of its
# square, and inputs by how many operators they lie back.
BLOCK = (
    ("LayerNorm", 0.1, 1, 0, (1,)),
    ("Linear(query)", 0.5, 1, 1, (1,)),
    ("Linear(key)", 0.5, 1, 1, (2,)),
    ("Linear(value)", 0.5, 1, 1, (3,)),
    ("Scores", 0.4, 2, 0, (2, 3)),
    ("Mix", 0.4, 1, 0, (1, 2)),
    ("Linear(out)", 0.5, 1, 1, (1,)),
    ("Add", 0.05, 1, 0, (1, 8)),
    ("LayerNorm", 0.1, 1, 0, (1,)),
    ("Linear(up)", 2.0, 4, 4, (1,)),
    ("GELU", 0.2, 4, 0, (1,)),
    ("Linear(down)", 2.0, 1, 4, (1,)),
    ("Add", 0.05, 1, 0, (1, 5)),
)


def transformer(count: int) -> Graph:
    """An embedding and as many blocks as make `count` nodes, times within a tenth of the usual."""
    draw = random.Random(count)
    activation, square = 4.0 * LENGTH * HIDDEN, 4.0 * HIDDEN**2
    nodes = [Node("node1", "Embedding", 1e-4, 2e-4, (activation,), 50_000 * 4.0 * HIDDEN)]
    edges = []
    while len(nodes) < count:
        for name, milliseconds, outputs, weights, back in BLOCK:
            number, seconds = len(nodes) + 1, milliseconds * 1e-3 * draw.uniform(0.9, 1.1)
            times = round(seconds, 6), round(2 * seconds, 6)
            sizes = (outputs * activation,), weights * square
            nodes.append(Node(f"node{number}", name, *times, *sizes))
            edges += [(f"node{number - step}", f"node{number}") for step in back]
    return Graph({node.id: node for node in nodes}, tuple(edges))


def plan(graph: Path, machines: str, bandwidth: str, *options: str) -> dict[str, Any]:
    """Runs pd-optimize: seconds of the process, its peak bytes, and what it says of the plan."""
    folder = graph.parent / "plan"
    command = ["pd-optimize", str(graph), "--machines", machines, "--bandwidth", bandwidth]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*command, *options, "-o", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    said = process.stdout.read().decode()
    _, process.returncode, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if process.returncode:
        raise click.ClickException(said.strip())
    predicted = json.loads((folder / "plan.json").read_text())["predicted"]
    best, bound = predicted["seconds_per_minibatch"], predicted["lower_bound_seconds"]
    return {
        "machines": machines,
        "process_seconds": seconds,
        "peak_bytes": used.ru_maxrss * 1024,
        "minibatch_seconds": best,
        "gap": best / bound - 1,
        "exact": bool(re.search("best of all plans", said)),
    }


def scaling(folder: Path) -> Iterator[dict[str, Any]]:
    """Nodes, devices and levels, one grown at a time."""
    cases = [("nodes", count, "8,8") for count in (100, 300, 1_000, 3_000, 10_000)]
    cases += [("devices", 10_000, shape) for shape in ("8", "8,8", "8,8,8", "8,8,8,8")]
    cases += [("levels", 3_000, shape) for shape in ("64", "8,8", "4,4,4", "2,4,4,2")]
    for grows, count, machines in cases:
        graph = folder / f"transformer{count}" / "graph.txt"
        graph.parent.mkdir(parents=True, exist_ok=True)
        graph.write_text(format_graph(transformer(count)), encoding="utf-8")
        bandwidth = ",".join(BANDWIDTH[: machines.count(",") + 1])
        yield {"grows": grows, "nodes": count, **plan(graph, machines, bandwidth)}


def published(reference: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """The published profiles, under the released cost model and the paper's."""
    cases = json.loads((reference / "expected.json").read_text())["cases"]
    released = {
        (case["profile"], ",".join(map(str, case["machines"]))): case.get(
            "released_optimizer_wall_seconds"
        )
        for case in cases
        if case["activation_compression"] == 1 and not case["straight"]
    }
    for source in sorted(reference.glob("profiles/*/graph.txt")):
        name = source.parent.name
        graph = folder / name / "graph.txt"
        graph.parent.mkdir(parents=True, exist_ok=True)
        graph.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        for machines in ("4", "8", "16", "4,4"):
            bandwidth = "10GB,1GB" if "," in machines else "1GB"
            for model in (("paper",), ("released", "--activation-compression", "1")):
                figures = plan(graph, machines, bandwidth, "--cost-model", *model)
                before = released.get((name, machines)) if model[0] == "released" else None
                yield {
                    "profile": name,
                    "model": model[0],
                    **figures,
                    "released_optimizer_seconds": before,
                }


def draw(table: pd.DataFrame, path: Path) -> None:
    figure, panels = plt.subplots(1, 3, figsize=(13, 4), sharey=True)
    for panel, (grows, rows) in zip(panels, table.groupby("grows", sort=False), strict=True):
        across = rows["nodes"].astype(str) if grows == "nodes" else rows["machines"]
        panel.plot(across, rows["process_seconds"], marker="o", color="#0072B2")
        for place, seconds, gap in zip(across, rows["process_seconds"], rows["gap"], strict=True):
            note = "best" if gap < 1e-9 else f"within {gap:.1%}"
            panel.annotate(note, (place, seconds), xytext=(0, 7), textcoords="offset points")
        fixed = "on 8,8" if grows == "nodes" else f"for {rows['nodes'].iloc[0]:,} nodes"
        panel.set_title(f"{grows}, {fixed}")
        panel.set_xlabel({"nodes": "nodes"}.get(str(grows), "machines of each level"))
        panel.margins(x=0.15, y=0.2)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("seconds, whole process")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default="runs/planner")
@click.option("--published", "reference", type=click.Path(path_type=Path, exists=True))
def main(output: Path, reference: Path | None) -> None:
    """Times the planner."""
    plan_once = output / "first"
    plan_once.mkdir(parents=True, exist_ok=True)
    (plan_once / "graph.txt").write_text(format_graph(transformer(3_000)), encoding="utf-8")
    plan(plan_once / "graph.txt", "2,2", "1GB,1GB")  # compiles what is cached from then on
    with pd.option_context("display.width", 200, "display.max_rows", None):
        if reference is not None:
            known = pd.DataFrame(published(reference, output))
            known.to_csv(output / "published.csv", index=False)
            print(known.to_string(index=False, float_format="{:.4g}".format))
        table = pd.DataFrame(scaling(output))
        table.to_csv(output / "planner.csv", index=False)
        print(table.to_string(index=False, float_format="{:.4g}".format))
    draw(table, output / "planner.png")


if __name__ == "__main__":
    main()
