"""How long pd-optimize plans, whole processes, and how close to the best possible it comes.

    python scripts/bench/planner.py -o runs/planner [--published FOLDER] [--only PART ...]

Transformers of 100 to 10,000 nodes, with the side branches of attention and residual connections,
on 64 devices (`nodes`); then the largest on 8 to 4,096 devices (`devices`), and one on 64 devices
in one to four levels (`levels`). With `--published` the profiles FOLDER/profiles/NAME/graph.txt,
too, under the paper's cost model (`paper`), and under the released one (`released`) beside what
FOLDER/expected.json has of the released optimizer. Each part writes PART.csv; planner.png and
tables.md, which docs/explanation/planner.md shows, are made of all parts that have been measured.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import matplotlib.pyplot as plt
import pandas as pd

from pipedream.graph.model import Graph, Node, format_graph

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


SHAPES = ("4", "8", "16", "4,4")
SCALING = {
    "nodes": [(count, "8,8") for count in (100, 300, 1_000, 3_000, 10_000)],
    "devices": [(10_000, shape) for shape in ("8", "8,8", "8,8,8", "8,8,8,8")],
    "levels": [(3_000, shape) for shape in ("64", "8,8", "4,4,4", "2,4,4,2")],
}
MODELS = {"paper": (), "released": ("--activation-compression", "1")}


def scaling(part: str, folder: Path) -> Iterator[dict[str, Any]]:
    for count, machines in SCALING[part]:
        graph = folder / f"transformer{count}" / "graph.txt"
        graph.parent.mkdir(parents=True, exist_ok=True)
        graph.write_text(format_graph(transformer(count)), encoding="utf-8")
        bandwidth = ",".join(BANDWIDTH[: machines.count(",") + 1])
        yield {"nodes": count, **plan(graph, machines, bandwidth)}


def published(model: str, reference: Path, folder: Path) -> Iterator[dict[str, Any]]:
    cases = json.loads((reference / "expected.json").read_text())["cases"]
    recorded = {
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
        for machines in SHAPES:
            bandwidth = "10GB,1GB" if "," in machines else "1GB"
            found = plan(graph, machines, bandwidth, "--cost-model", model, *MODELS[model])
            before = recorded.get((name, machines)) if model == "released" else None
            yield {"profile": name, **found, "recorded_seconds": before}


def quality(row: pd.Series) -> str:  # type: ignore[type-arg]
    """How good the plan is, in a word or two; what is below a tenth of a percent is rounded up."""
    if row["gap"] < 1e-6:
        return "best"
    return f"within {math.ceil(row['gap'] * 1000) / 10:.1f} %"


def tables(parts: Mapping[str, pd.DataFrame]) -> Iterator[str]:
    """Markdown: the scaling of each kind, then a line for each published profile."""
    for part, table in parts.items():
        if part in SCALING:
            yield f"| nodes | machines | {part} grow: seconds | peak memory | plan |"
            yield "|---:|---|---:|---:|---|"
            for _, row in table.iterrows():
                figures = f"{row['process_seconds']:.1f} | {row['peak_bytes'] / 1e6:.0f} MB"
                yield f"| {row['nodes']:,} | {row['machines']} | {figures} | {quality(row)} |"
        else:
            yield f"| {part} | " + " | ".join(SHAPES) + " |"
            yield "|---|" + "---|" * len(SHAPES)
            for name, rows in table.groupby("profile"):
                yield f"| {name} | " + " | ".join(cell(row) for _, row in rows.iterrows()) + " |"
        yield ""


def cell(row: pd.Series) -> str:  # type: ignore[type-arg]
    recorded = row["recorded_seconds"]
    before = f" (was {recorded:.1f} s)" if recorded == recorded else ""
    return f"{row['process_seconds']:.1f} s, {quality(row)}{before}"


def draw(parts: Mapping[str, pd.DataFrame], path: Path) -> None:
    """Seconds as nodes, devices and levels grow, each with how good the plan is (PNG)."""
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.8), sharey=True, layout="constrained")
    for panel, (part, table) in zip(panels, parts.items(), strict=True):
        nodes, seconds = table["nodes"], table["process_seconds"]
        across = [f"{count:,}" for count in nodes] if part == "nodes" else list(table["machines"])
        panel.bar(across, seconds, width=0.6, color="#56B4E9")
        for rank_info, (_, row) in enumerate(table.iterrows()):
            note = f"{row['process_seconds']:.1f} s\n{quality(row)}"
            panel.annotate(
                note,
                (rank_info, row["process_seconds"]),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
        fixed = "on 64 devices, 8,8" if part == "nodes" else f"for {nodes.iloc[0]:,} nodes"
        panel.set_title(f"{part}, {fixed}", fontsize=11)
        panel.set_xlabel("nodes" if part == "nodes" else "machines of each level")
        panel.margins(y=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seconds, whole process")
    figure.savefig(path, dpi=100)


def measure(part: str, output: Path, reference: Path | None) -> pd.DataFrame:
    if part in SCALING:
        rows = scaling(part, output)
    else:
        if reference is None:
            raise click.UsageError(f"--only {part} needs --published FOLDER")
        rows = published(part, reference, output)
    table = pd.DataFrame(rows)
    table.to_csv(output / f"{part}.csv", index=False)
    return table


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default="runs/planner")
@click.option("--published", "reference", type=click.Path(path_type=Path, exists=True))
@click.option("--only", multiple=True, type=click.Choice([*SCALING, *MODELS]), help="Parts.")
def main(output: Path, reference: Path | None, only: tuple[str, ...]) -> None:
    """Times the planner."""
    first = output / "first" / "graph.txt"
    first.parent.mkdir(parents=True, exist_ok=True)
    first.write_text(format_graph(transformer(3_000)), encoding="utf-8")
    plan(first, "2,2", "1GB,1GB")  # compiles what is cached from then on
    for part in only or (*SCALING, *(MODELS if reference else ())):
        table = measure(part, output, reference)
        print(table.to_string(index=False, float_format="{:.4g}".format))
    there = [part for part in (*SCALING, *MODELS) if (output / f"{part}.csv").exists()]
    parts = {part: pd.read_csv(output / f"{part}.csv") for part in there}
    (output / "tables.md").write_text("\n".join(tables(parts)), encoding="utf-8")
    scaled = {part: table for part, table in parts.items() if part in SCALING}
    if len(scaled) == len(SCALING):
        draw(scaled, output / "planner.png")


if __name__ == "__main__":
    main()
