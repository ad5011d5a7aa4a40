"""What is known of a run at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipedream.graph.measured_run import MeasuredRun
from pipedream.graph.model import Graph, read_graph
from pipedream.graph.plan import PlannedGraph
from pipedream.graph.profile import read_profile
from pipedream.runtime.report.expectation import Comparison, advice, compare
from pipedream.runtime.report.stage_seconds import StagesMeasured
from pipedream.runtime.report.utilisation import Utilisation
from pipedream.runtime.report.where_time_is import what_is_off
from pipedream.runtime.run.job import Job

_LONGEST_NAME = 80


@dataclass(frozen=True)
class FinishedRun:
    """`summary` is what summary.json gets, `measured` what measured.json has, if there is one;
    `stages`: what their workers did in the last epoch.
    """

    job: Job
    summary: Mapping[str, Any]
    spent: Utilisation
    measured: MeasuredRun | None
    stages: StagesMeasured | None = None

    @property
    def comparison(self) -> Comparison | None:
        """Returns the plan's expectation beside the run; None if it was trained in another way."""
        return compare(self.measured) if self.measured and self.job.as_planned else None

    @property
    def reason(self) -> list[str]:
        """Returns a line on what made the run slower or faster than expected."""
        if self.stages is None or not self.job.is_comparable:
            return []
        return what_is_off(self.job.plan.predicted, self.stages)

    @property
    def advice(self) -> list[str]:
        """Returns lines on what would bring plan and run together."""
        if self.comparison is None or self.measured is None:
            return []
        return advice(self.comparison, self.measured, self.job.run)

    def planned_graph(self) -> Graph | None:
        """Returns the graph.txt that pd-optimize wrote beside the plan; None if missing or another.

        Raises UserError if it is broken.
        """
        folder = self.job.plan_folder
        if folder is None or not (folder / "graph.txt").is_file():
            return None
        graph = read_graph(folder / "graph.txt")
        return graph if PlannedGraph.of(graph) == self.job.plan.graph else None

    def layer_names(self) -> dict[str, str]:
        """A name for each node of the plan: `layer1.conv1: Conv2d` by the profile that the plan was
        made from, `node7 Conv2d` without it.
        """
        nodes = self.job.plan.graph.nodes
        names = {node.id: f"{node.id} {node.description.partition('(')[0]}" for node in nodes}
        names |= self._profiled_names()
        return {
            name: text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 3]}..."
            for name, text in names.items()
        }

    def _profiled_names(self) -> dict[str, str]:
        plan = self.job.plan
        if plan.asked is None or plan.asked.profile is None:
            return {}
        path = self.job.run / plan.asked.profile
        if not path.is_file():
            return {}
        profile = read_profile(path)
        if profile.graph_fingerprint != plan.graph.fingerprint:
            return {}
        return {node.id: f"{node.module}: {node.op}" for node in profile.nodes if node.module}
