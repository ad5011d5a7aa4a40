"""A plan for each batch size that was profiled, and which of them trains fastest.

What is comparable is the time of an example: that of a minibatch over its size. Small minibatches
fill a pipeline better and hold less memory, large ones waste less on calls, messages and updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan
from pipedream.graph.profile import difference, folder_of, sizes_in
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.optimizer.compare.comparison import no_plan, show_replicas
from pipedream.optimizer.report import make_console, print_table

if TYPE_CHECKING:
    import pandas as pd

    from pipedream.optimizer.cli.options import Options


def options_by_size(options: Options, typed: Callable[[str], bool]) -> dict[int, Options | None]:
    """What to plan at each size of the folder GRAPH, the smallest first; None at those that make no
    whole number of microbatches of --global-batch. `typed` tells of an option if it was.

    Raises UserError.
    """
    folder, whole = options.graph, options.global_batch
    _check(options, typed)
    found: dict[int, Options | None] = {}
    for size in sizes_in(folder):
        count = options.microbatches if whole is None else whole // size
        graph = folder_of(folder, size) / "graph.txt"
        asked = replace(
            options, graph=graph, output=options.folder, profile=None, microbatches=count
        )
        found[size] = asked if whole is None or whole % size == 0 else None
    if not found:
        raise UserError(
            f"{folder}: no profiles of batch sizes here, as pd-profile --batch-sizes makes them:"
            " name such a folder, or a graph.txt"
        )
    if not any(found.values()):
        sizes = ", ".join(map(str, found))
        raise UserError(f"--global-batch {whole}: is a multiple of no batch size ({sizes})")
    return found


def _check(options: Options, typed: Callable[[str], bool]) -> None:
    folder = options.graph
    if options.calibrate:
        raise UserError(
            f"--calibrate: a run has one batch size: name the graph.txt of that one in {folder}"
        )
    if typed("profile"):
        raise UserError(f"--profile: in {folder} each batch size has its own: leave it out")
    if options.folder.resolve() == folder.resolve():
        raise UserError(f"-o {folder}: what was profiled is there: name another folder")
    if options.global_batch is not None and typed("microbatches"):
        raise UserError(
            "--global-batch and --microbatches both say what an update is of: give one of them"
        )


def check_alike(graphs: Mapping[int, Graph], folder: Path) -> None:
    """Raises UserError unless these, by batch size, are one model."""
    least = min(graphs)
    for size, graph in graphs.items():
        found = difference(graphs[least], least, graph, size)
        if found is not None:
            raise UserError(
                f"{folder}: batch-{size} is of another model than batch-{least}: {found}; profile"
                " them together, with pd-profile --batch-sizes"
            )


@dataclass(frozen=True)
class Choice:
    """A batch size and its plan; or what is wrong with it, in short and in a line of its own."""

    batch_size: int
    plan: Plan | None
    remark: str = ""
    problem: str | None = None

    @staticmethod
    def without_plan(batch_size: int, problem: str) -> Choice:
        return Choice(batch_size, None, no_plan(problem), problem)

    @property
    def microbatches(self) -> int | None:
        """Of one update, where it is of several."""
        return self.plan.predicted.microbatches if self.plan else None

    @property
    def per_minibatch(self) -> float | None:
        """Seconds, by the cost model."""
        return self.plan.predicted.seconds_shared_out if self.plan else None

    @property
    def simulated(self) -> float | None:
        """Seconds per minibatch; None where that takes too long."""
        noted = self.plan.predicted.simulated if self.plan else None
        return noted.seconds_per_minibatch if noted else None

    @property
    def memory(self) -> float | None:
        """Bytes that the fullest worker needs."""
        return max(stage.memory_bytes for stage in self.plan.stages) if self.plan else None


@dataclass(frozen=True)
class Choices:
    """By batch size, the smallest first. `global_batch`: examples of one update, where that is
    settled.
    """

    of: tuple[Choice, ...]
    global_batch: int | None = None

    @property
    def planned(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.of if choice.plan is not None)

    @cached_property
    def all_simulated(self) -> bool:
        """Then that is what decides: the cost model knows nothing of bubbles, for one."""
        return all(choice.simulated is not None for choice in self.planned)

    def per_example(self, choice: Choice) -> float:
        """Seconds of one that has a plan, by what decides."""
        seconds = choice.simulated if self.all_simulated else choice.per_minibatch
        assert seconds is not None
        return seconds / choice.batch_size

    @cached_property
    def best(self) -> Choice:
        """With the least time for an example; of those alike the smallest. There has to be one."""
        return min(self.planned, key=self.per_example)

    @property
    def words(self) -> str:
        """One line for the user."""
        best, seconds = self.best, self.per_example(self.best)
        faster = [
            f"{self.per_example(choice) / seconds:.2f} times as fast as {choice.batch_size}"
            for choice in self.planned
            if choice is not best and seconds
        ]
        rounds = "" if best.microbatches is None else f", microbatches: {best.microbatches}"
        return (
            f"Batch size {best.batch_size} is the fastest: {self._goal(seconds)};"
            f" {', '.join(faster) or 'no other has a plan'}. In the run config: batch_size:"
            f" {best.batch_size}{rounds}"
        )

    def _goal(self, per_example: float) -> str:
        how = ", simulated" if self.all_simulated else ""
        if self.global_batch is None:
            return f"{show_seconds(per_example)} per example{how}"
        whole = show_seconds(per_example * self.global_batch)
        return f"{whole} per update of {self.global_batch} examples{how}"


def print_choices(choices: Choices) -> None:
    """Prints their table, and why there are no plans for some. Raises UserError if for none."""
    lines = [
        f"batch size {choice.batch_size}: {choice.problem}"
        for choice in choices.of
        if choice.problem is not None
    ]
    if not choices.planned:
        raise UserError(f"there is a plan for no batch size; {lines[0]}")
    print_table(make_console(), choices_table(choices))
    for line in lines:
        click.echo(line)


def choices_table(choices: Choices) -> Table:
    """A row for each batch size, the one that is chosen in bold."""
    by = "as simulated" if choices.all_simulated else "by the cost model"
    table = Table(
        title="A plan for each batch size",
        caption=f"In bold the size whose examples take the least time, {by}. Memory: of the"
        " fullest worker.",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    headings = list(_cells(choices.best, choices))
    if choices.planned != choices.of:
        headings.append("")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=bool(heading))
    for choice in choices.of:
        cells = _cells(choice, choices)
        row = [cells.get(heading, "") for heading in headings]
        table.add_row(*row, style="bold" if choice is choices.best else None)
    return table


def _cells(choice: Choice, choices: Choices) -> dict[str, str]:
    """By their headings; those that it has."""
    cells = {"batch\nsize": str(choice.batch_size)}
    if choice.plan is None:
        return cells | {"": choice.remark}
    if choice.microbatches is not None:
        cells["micro-\nbatches"] = str(choice.microbatches)
    seconds, simulated = choices.per_example(choice), choice.simulated
    cells["replicas\nof stages"] = show_replicas(choice.plan.replicas)
    cells["per\nminibatch"] = show_seconds(choice.per_minibatch or 0.0)
    cells["simulated"] = "-" if simulated is None else show_seconds(simulated)
    if choices.global_batch is None:
        cells["per\nexample"] = show_seconds(seconds)
    else:
        cells["per\nupdate"] = show_seconds(seconds * choices.global_batch)
    cells["examples\nper second"] = f"{1 / seconds:.4g}" if seconds else "-"
    return cells | {"memory": show_bytes(choice.memory or 0.0)}


def choices_frame(choices: Choices) -> pd.DataFrame:
    """The table as data: seconds and bytes."""
    import pandas as pd

    return pd.DataFrame(
        {
            "batch_size": choice.batch_size,
            "microbatches": choice.microbatches,
            "stages": choice.plan and len(choice.plan.stages),
            "replicas": choice.plan and " ".join(map(str, choice.plan.replicas)),
            "seconds_per_minibatch": choice.per_minibatch,
            "simulated_seconds_per_minibatch": choice.simulated,
            "seconds_per_example": choices.per_example(choice) if choice.plan else None,
            "memory_bytes": choice.memory,
            "chosen": choice is choices.best,
            "problem": choice.problem or choice.remark or None,
        }
        for choice in choices.of
    ).convert_dtypes()
