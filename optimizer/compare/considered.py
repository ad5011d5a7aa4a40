"""What was planned for an update of so many examples, and against what: a row for each choice of
batch size, order and what memory asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.graph.plan import DraftPlan
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.optimizer.report.tables import show_mesh, show_replicas, table_of


@dataclass(frozen=True)
class Considered:
    """A choice; `seconds` of an update, simulated; `rough`: whether it was planned roughly, with
    workers of one device; `rank_bytes`: what a rank of several stages holds. Without a plan
    `problem` says why.
    """

    batch_size: int
    plan: DraftPlan | None = None
    seconds: float | None = None
    rough: bool = True
    chosen: bool = False
    problem: str = ""
    rank_bytes: float | None = None

    @property
    def memory(self) -> float:
        """Bytes of the fullest device."""
        assert self.plan is not None
        return self.rank_bytes or max(stage.memory_bytes for stage in self.plan.stages)

    @property
    def order(self) -> str:
        return (self.plan and self.plan.order) or DEFAULT_ORDER


def considered_table(rows: Sequence[Considered], examples: int) -> Table:
    """The choice comes first, in bold; the others by their time."""
    known = [row for row in rows if row.plan is not None]
    known.sort(key=lambda row: (not row.chosen, row.seconds or 0.0))
    without = [row for row in rows if row.plan is None]
    return table_of(
        "What was chosen, and against what",
        f"Simulated, for an update of {examples:,} examples. Saved by: what makes a stage fit its"
        " devices. Rough: the best of a few plans with workers of one device, not improved.",
        [_cells(row, examples) for row in (*known, *without)],
        bold=[number for number, row in enumerate(known) if row.chosen],
        wrapped=("saved by", "remark"),
    )


def _cells(row: Considered, examples: int) -> dict[str, str]:
    cells = {"batch\nsize": str(row.batch_size)}
    if row.plan is None:
        return cells | {"remark": row.problem}
    return cells | {
        "micro-\nbatches": str(examples // row.batch_size),
        "order": row.order,
        "replicas\nof stages": show_replicas(row.plan.replicas),
        "mesh": _meshes(row.plan),
        "saved by": saved_by(row.plan) or "-",
        "per\nupdate": show_seconds(row.seconds or 0.0),
        "memory": show_bytes(row.memory),
        "remark": "chosen" if row.chosen else "rough" if row.rough else "",
    }


def _meshes(plan: DraftPlan) -> str:
    return " or ".join(dict.fromkeys(show_mesh(stage.mesh) for stage in plan.stages))


def saved_by(plan: DraftPlan) -> str:
    """What the planner does to save memory, with how many of the stages have it."""
    ways = {
        "recompute": [stage.recompute is True for stage in plan.stages],
        "recompute nodes": [bool(stage.recomputed_nodes) for stage in plan.stages],
        "ZeRO-1": [stage.zero for stage in plan.stages],
        "host": [bool(stage.offload) for stage in plan.stages],
    }
    count = len(plan.stages)
    return ", ".join(
        name if all(which) else f"{name} ({sum(which)} of {count} stages)"
        for name, which in ways.items()
        if any(which)
    )
