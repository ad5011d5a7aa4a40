"""`pipedream.optimize`: pd-optimize from Python."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from pipedream.command_line import checked
from pipedream.graph.command import write_whole
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan
from pipedream.graph.shown.tables import make_console
from pipedream.graph.units import show_seconds
from pipedream.optimizer.cli.answer.plan import plan
from pipedream.optimizer.cli.options import ModelInMemory, option_types
from pipedream.optimizer.cli.output import sections
from pipedream.optimizer.cli.planning import quick_collector
from pipedream.optimizer.cli.values import make_options
from pipedream.profiling import Profiled


@dataclass(frozen=True, repr=False)
class Planned:
    """A plan; `files`: what pd-optimize writes, by name; `report`: what it prints."""

    plan: Plan
    report: str
    files: Mapping[str, bytes]

    def write(self, folder: str | Path) -> Path:
        """Writes plan.json, graph.txt with stage ids and the pictures; returns the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_whole(folder / name, content)
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


@partial(checked, options=[name for name in option_types() if name != "output"])
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
    given = {"machines": machines, "bandwidth": bandwidth, **options}
    report = io.StringIO()
    console = make_console(report)
    files: dict[str, bytes] = {}
    with quick_collector():
        planning = plan(make_options(_model(graph), given))
        for section in sections(planning):
            section.show(console)
            files |= {name: text for name, text in section.files.items() if text is not None}
    return Planned(Plan.model_validate_json(files["plan.json"]), report.getvalue(), files)


def _model(graph: Profiled | Graph | str | Path) -> ModelInMemory | Path:
    if isinstance(graph, Profiled):
        return ModelInMemory(graph.graph, graph.profile, graph.operators)
    return ModelInMemory(graph) if isinstance(graph, Graph) else Path(graph)
