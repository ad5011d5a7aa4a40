"""What are found shardings worth, and are they ever slower than none? As simulated.

    python scripts/bench/meshes/worth.py FOLDER... [--clusters 8,4/450GB,50GB ...]

Each FOLDER is one of pd-profile's, with operators.json. It is planned for each cluster (machines,
slash, bandwidths) with a flush, with `--intra-op auto` and with `none`. Exits with 1 if any plan of
auto is slower.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import click
import pandas as pd
from gain import stages

from pipedream.graph.plan import Plan, read_plan
from pipedream.optimizer.cli.command import main as optimize

CLUSTERS = ("2/10GB", "4/10GB", "8/450GB", "4,2/10GB,1GB", "8,4/450GB,50GB")


@click.command()
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
@click.option("--clusters", multiple=True, default=CLUSTERS, show_default=True)
@click.option("--speed", default=1.0, show_default=True, help="As pd-optimize's.")
@click.option("--microbatches", default=4, show_default=True, help="Of an update.")
def main(folders: tuple[Path, ...], clusters: tuple[str, ...], speed: float, microbatches: int):
    table = []
    for row in rows(folders, clusters, speed, microbatches):
        table.append(row)
        print(*row.values(), sep=" | ", flush=True)
    frame = pd.DataFrame(table)
    print(
        f"\n{frame.to_string(index=False)}\n{(frame.gain >= 1.2).sum()} at least 1.2 times faster"
    )
    sys.exit(bool((frame.gain < 1.0).any()))


def rows(
    folders: tuple[Path, ...], clusters: tuple[str, ...], speed: float, microbatches: int
) -> Iterator[dict[str, object]]:
    for folder in folders:
        for cluster in clusters:
            auto, none = (
                planned(folder, cluster, method, speed, microbatches) for method in ("auto", "none")
            )
            before, after = (simulated(plan) for plan in (none, auto))
            yield {
                "model": folder.name,
                "cluster": cluster,
                "none": f"{before * 1e3:.3f} ms",
                "auto": f"{after * 1e3:.3f} ms",
                "gain": round(before / after, 3),
                "stages": stages(auto),
            }


def simulated(plan: Plan) -> float:
    assert plan.predicted.simulated is not None
    return plan.predicted.simulated.seconds_per_minibatch


def planned(folder: Path, cluster: str, method: str, speed: float, microbatches: int) -> Plan:
    machines, bandwidth = cluster.split("/")
    with tempfile.TemporaryDirectory(prefix="bench-") as out:
        words = [str(folder / "graph.txt"), "--machines", machines, "--bandwidth", bandwidth]
        words += ["--schedule", "flush", "--microbatches", str(microbatches), "-o", out]
        words += ["--intra-op", method, "--speed", str(speed)]
        with suppress(SystemExit), redirect_stdout(StringIO()):
            optimize(words)
        return read_plan(Path(out) / "plan.json")


if __name__ == "__main__":
    main()
