"""`pipedream.optimize`: pd-optimize from Python."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipedream.command_line import checked, words
from pipedream.graph.command import whole, write_whole
from pipedream.graph.model import Graph, format_graph
from pipedream.graph.plan import Plan, read_plan
from pipedream.graph.units import show_seconds
from pipedream.optimizer.cli.command import main as pd_optimize
from pipedream.profiling import Profiled

_OF_THE_FOLDER = ("Written: ", "Next: ", "Exported: ")
"""How lines of pd-optimize begin that name its folder: one for the time being here."""


@dataclass(frozen=True, repr=False)
class Planned:
    """A plan, and in `files` what pd-optimize wrote, by name; `report` is what it printed, as is
    `str(planned)`.
    """

    plan: Plan
    report: str
    files: Mapping[str, bytes]

    def write(self, folder: str | Path) -> Path:
        """Writes plan.json, graph.txt with stage ids and the pictures; returns the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            with whole(folder / name) as fresh:
                fresh.write_bytes(content)
        return folder

    def __repr__(self) -> str:
        plan = self.plan
        seconds = plan.predicted.seconds_in_a_run
        return (
            f"<plan of {len(plan.stages)} stages on {plan.workers} of {plan.cluster.devices}"
            f" devices, {plan.schedule}: {show_seconds(seconds)} per minibatch>"
        )

    def __str__(self) -> str:
        return self.report

    def _repr_html_(self) -> str:
        picture = self.files.get("graph.svg", b"").decode(errors="replace")
        svg = picture[max(picture.find("<svg"), 0) :]
        scrolling = f'<div style="max-height: 40em; overflow: auto">{svg}</div>'
        return f"<pre>{escape(self.report)}</pre>{scrolling if svg else ''}"


@partial(checked, command=pd_optimize)
def optimize(
    graph: Profiled | Graph | str | Path,
    machines: Sequence[int] | int | None = None,
    bandwidth: Sequence[str] | str | None = None,
    **options: Any,
) -> Planned:
    """Plans a profiled model, or that of a graph.txt, for a cluster such as `machines=(4, 2)` with
    `bandwidth=("100GB/s", "10GB/s")`.

    `options` are those of pd-optimize, with `_` for `-`: `optimize(graph, cluster="cluster.yaml",
    memory="16GB", schedule="flush")`; `split=("layer2", "layer3"), replicas=(2, 1, 1)` prices your
    own stages. Raises UserError.
    """
    with TemporaryDirectory() as folder, _quick_collector():
        made = Path(folder) / "plan"
        asked = {"machines": machines, "bandwidth": bandwidth, **options}
        arguments = [str(_written(graph, Path(folder))), *words(asked), "--output", str(made)]
        report = io.StringIO()
        with redirect_stdout(report), pd_optimize.make_context("pd-optimize", arguments) as context:
            pd_optimize.invoke(context)
        files = {path.name: path.read_bytes() for path in made.iterdir() if path.is_file()}
        lines = report.getvalue().splitlines(keepends=True)
        kept = "".join(line for line in lines if not line.startswith(_OF_THE_FOLDER))
        return Planned(read_plan(made / "plan.json"), kept, files)


def _written(graph: Profiled | Graph | str | Path, folder: Path) -> Path:
    """The path of its graph.txt."""
    if isinstance(graph, Profiled):
        return graph.write(folder / "profile") / "graph.txt"
    if isinstance(graph, Graph):
        write_whole(folder / "graph.txt", format_graph(graph))
        return folder / "graph.txt"
    return Path(graph)


@contextmanager
def _quick_collector() -> Iterator[None]:
    """pd-optimize changes the thresholds of Python's garbage collector, which is not this process's
    own.
    """
    before = gc.get_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*before)
