"""Plans for each profiled batch size, and which of them trains fastest.

They are compared by the time per example, that of a minibatch over its size. Small minibatches fill
a pipeline better and need less memory; large ones spend less on calls, messages and updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.profile import difference
from pipedream.graph.shown.tables import print_line, print_table
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.optimizer.compare.comparison import Candidate, no_plan
from pipedream.optimizer.report.tables import show_replicas, table_of

if TYPE_CHECKING:
    import pandas as pd


def check_alike(graphs: Mapping[int, Graph], folder: Path) -> None:
    """Raises UserError unless these graphs, by batch size, are of one model."""
    least = min(graphs)
    for size, graph in graphs.items():
        reason = difference(graphs[least], least, graph, size)
        if reason is not None:
            raise UserError(
                f"{folder}: batch-{size} is of another model than batch-{least}: {reason}; profile"
                " them together, with pd-profile --batch-sizes"
            )


@dataclass(frozen=True)
class Choice(Candidate):
    """A batch size and its plan, or a `remark` why it has none."""

    batch_size: int
    remark: str = ""

    @property
    def microbatches(self) -> int | None:
        """Microbatches of one update, if it has several."""
        return self.plan.predicted.microbatches if self.plan else None


@dataclass(frozen=True)
class Choices:
    """The choices by batch size, smallest first; `global_batch`: examples per update, if set."""

    of: tuple[Choice, ...]
    global_batch: int | None = None

    @property
    def planned(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.of if choice.plan is not None)

    @property
    def problems(self) -> list[str]:
        """Why sizes have no plan, in a line each."""
        return [f"batch size {c.batch_size}: {c.problem}" for c in self.of if c.problem]

    @cached_property
    def all_simulated(self) -> bool:
        """Whether simulated times decide; the cost model ignores bubbles, for one."""
        return all(choice.simulated is not None for choice in self.planned)

    def per_example(self, choice: Choice) -> float:
        """Seconds per example of a choice that has a plan."""
        seconds = choice.simulated if self.all_simulated else choice.seconds
        assert seconds is not None
        return seconds / choice.batch_size

    @cached_property
    def best(self) -> Choice:
        """The choice with the least time per example, the smallest on ties."""
        return min(self.planned, key=self.per_example)

    @property
    def words(self) -> str:
        """The result in one line."""
        best, seconds = self.best, self.per_example(self.best)
        faster = [
            f"{self.per_example(choice) / seconds:.2f} times as fast as {choice.batch_size}"
            for choice in self.planned
            if choice is not best and seconds
        ]
        rounds = "" if best.microbatches is None else f", microbatches: {best.microbatches}"
        count = self.global_batch
        unit = "example" if count is None else f"update of {count} examples"
        return (
            f"Batch size {best.batch_size} is the fastest: {show_seconds(seconds * (count or 1))}"
            f" per {unit}{', simulated' if self.all_simulated else ''};"
            f" {', '.join(faster) or 'no other has a plan'}. In the run config: batch_size:"
            f" {best.batch_size}{rounds}"
        )


def print_choices(choices: Choices, console: Console) -> None:
    """Prints the table, and why sizes have no plan."""
    print_table(console, choices_table(choices))
    for line in choices.problems:
        print_line(console, line)


def choices_table(choices: Choices) -> Table:
    """A row per batch size; the chosen one is bold."""
    by = "as simulated" if choices.all_simulated else "by the cost model"
    return table_of(
        "A plan for each batch size",
        f"In bold the size whose examples take the least time, {by}. Memory: of the fullest"
        " worker.",
        [_cells(choice, choices) for choice in choices.of],
        bold=[choices.of.index(choices.best)],
    )


def _cells(choice: Choice, choices: Choices) -> dict[str, str]:
    cells = {"batch\nsize": str(choice.batch_size)}
    if choice.plan is None:
        return cells | {"": choice.remark or no_plan(choice.problem or "")}
    if choice.microbatches is not None:
        cells["micro-\nbatches"] = str(choice.microbatches)
    seconds, simulated, whole = choices.per_example(choice), choice.simulated, choices.global_batch
    return cells | {
        "replicas\nof stages": show_replicas(choice.plan.replicas),
        "per\nminibatch": show_seconds(choice.seconds or 0.0),
        "simulated": "-" if simulated is None else show_seconds(simulated),
        f"per\n{'update' if whole else 'example'}": show_seconds(seconds * (whole or 1)),
        "examples\nper second": f"{1 / seconds:.4g}" if seconds else "-",
        "memory": show_bytes(choice.memory or 0.0),
    }


def choices_frame(choices: Choices) -> pd.DataFrame:
    """The table as data: seconds and bytes."""
    import pandas as pd

    return pd.DataFrame(
        {
            "batch_size": choice.batch_size,
            "microbatches": choice.microbatches,
            **choice.figures,
            "seconds_per_example": choices.per_example(choice) if choice.plan else None,
            "memory_bytes": choice.memory,
            "chosen": choice is choices.best,
            "problem": choice.problem or choice.remark or None,
        }
        for choice in choices.of
    ).convert_dtypes()
