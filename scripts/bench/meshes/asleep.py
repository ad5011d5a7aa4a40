"""What do found shardings gain on an emulated cluster, and is it as expected?

    python scripts/bench/meshes/asleep.py OUT [--cluster 4 --cluster 2x2] [--rate 100MB]

Trains `asleep_model` on devices that are network namespaces (scripts/bench/emulated), over links
with a rate: `4` is a machine of four devices, `2x2` two machines of two, with links between them
that are a tenth as fast. Profiles the model, measures the network as pd-profile does, plans with
`--intra-op none` and `auto`, and trains both plans in turns. Needs root.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import click
import pandas as pd

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent))
sys.path.append(str(Path(__file__).parent.parent / "emulated"))

from efficiency import call
from forked import run_ranks
from gain import stages
from launched import launch
from measured_cluster import measure_cluster
from network import EmulatedNetwork

import pipedream.runtime.trainer  # noqa: F401 - so that the processes need not import it
from pipedream.graph.cluster import Cluster, write_cluster
from pipedream.graph.plan import Plan, read_plan
from pipedream.graph.units import parse_bytes
from pipedream.runtime.cli import main as pd_train

HERE = Path(__file__).parent
SECONDS = 200.0
CONFIG = {
    "format": "pipedream-run/1",
    "model": {"source": "asleep_model:network"},
    "data": {"source": "asleep_model:data"},
    "batch_size": 64,
    "microbatches": 2,
    "optimizer": {"name": "SGD", "args": {"lr": 0.01}},
}


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--cluster", "clusters", multiple=True, default=("4", "2x2"), show_default=True)
@click.option("--rate", default="100MB", show_default=True, help="Of the fastest links.")
@click.option("--turns", default=3, show_default=True)
def main(out: Path, clusters: tuple[str, ...], rate: str, turns: int) -> None:
    os.environ |= {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.yaml").write_text(json.dumps(CONFIG))
    if not (out / "graph.txt").exists():
        call("pd-profile", out / "run.yaml", "-o", out, "--repeats", 5, "--shards", 2)
    rows = [
        {"cluster": name, "turn": turn, **row}
        for name in clusters
        for turn, row in enumerate(measured(out, name, parse_bytes(rate), turns))
    ]
    print(pd.DataFrame(rows).to_string(index=False))


def measured(out: Path, name: str, rate: float, turns: int) -> list[dict[str, object]]:
    machines = tuple(map(int, name.split("x")))
    cluster = Cluster(machines=machines, bandwidth=(rate, rate / 10)[: len(machines)])
    folder = out / name
    write_cluster(measure_cluster(cluster, folder / "network"), folder / "cluster.yaml")
    plans: dict[str, Plan] = {}
    for method in ("none", "auto"):
        words = ("--cluster", folder / "cluster.yaml", "--schedule", "flush", "--microbatches", 2)
        options = (*words, "--intra-op", method, "--optimizer", "sgd", "-o", folder / method)
        call("pd-optimize", out / "graph.txt", *options)
        plans[method] = read_plan(folder / method / "plan.json")
    found = []
    for turn in range(turns):
        row: dict[str, object] = {}
        for method, plan in plans.items():
            taken = trained(out, folder / method, plan, cluster, turn)
            expected = plan.predicted.seconds_in_a_run
            row |= {method: f"{taken * 1e3:.1f} ms", f"of {method}": f"{taken / expected - 1:+.1%}"}
            row[f"{method} is"] = stages(plan)
            row[f"seconds {method}"] = taken
        row["gain"] = f"{row.pop('seconds none') / row.pop('seconds auto'):.2f}"  # type: ignore[operator]
        found.append(row)
    return found


def trained(out: Path, folder: Path, plan: Plan, cluster: Cluster, turn: int) -> float:
    """Seconds per minibatch."""
    run, used = folder / f"run{turn}", sorted(r for stage in plan.stages for r in stage.ranks)
    with closing(EmulatedNetwork(cluster)) as network:
        body = partial(_be_rank, network, out, folder / "plan.json", run, used)
        ended = run_ranks(plan.workers, body, folder, SECONDS)
    assert not any(ended.codes), f"see rank*.log in {folder}"
    seconds: float = json.loads((run / "summary.json").read_text())["seconds_per_minibatch"]
    return seconds


def _be_rank(
    network: EmulatedNetwork, out: Path, plan: Path, run: Path, used: Sequence[int], rank: int
) -> int:
    launch(network, rank, used)
    words = [str(plan), "--config", str(out / "run.yaml"), "-o", str(run), "--no-evaluate"]
    return int(pd_train(words, standalone_mode=False) or 0)


if __name__ == "__main__":
    main()
