"""What is divided in each stage, and what that moves, as tables for the terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from rich.table import Table

from pipedream.graph.plan import Plan, Stage
from pipedream.graph.sharding.assignment import Redistribution, redistributions
from pipedream.graph.sharding.steps import Collective
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.optimizer.sharding.division import Division


def sharding_table(plan: Plan, division: Division) -> Table:
    """One row for each way in which parameters of a stage are placed."""
    table = Table(title=f"Placements on a mesh of {' x '.join(map(str, division.mesh))} devices")
    table.add_column("stage", justify="right")
    table.add_column("placed")
    table.add_column("parameters", overflow="fold")
    for stage in plan.stages:
        for placed, names in _by_placement(stage).items():
            table.add_row(str(stage.stage), placed, ", ".join(names))
    return table


def traffic_table(plan: Plan, division: Division) -> Table:
    """What the devices of a team send to each other, by stage and collective."""
    table = Table(title="Communication within a team")
    for name in ("stage", "collective", "each", "count", "bytes", "time"):
        table.add_column(name, justify="left" if name in ("collective", "each") else "right")
    stage_of = _stages_of_values(plan, division)
    counts: Counter[tuple[int, str, str]] = Counter()
    amounts: dict[tuple[int, str, str], tuple[float, float]] = {}
    for each in redistributions(division.assignment):
        if each.bytes:
            key = stage_of.get(each.value, 0), _words(each), str(each.often)
            counts[key] += 1
            size, seconds = amounts.get(key, (0.0, 0.0))
            amounts[key] = size + each.bytes, seconds + each.seconds
    for key in sorted(counts):
        stage, collective, often = key
        size, seconds = amounts[key]
        row = (str(stage), collective, often, str(counts[key]))
        table.add_row(*row, show_bytes(size), show_seconds(seconds))
    return table


def _by_placement(stage: Stage) -> dict[str, list[str]]:
    """The names, numbers of layers as `*`, by placement; those that are whole last."""
    found: dict[str, dict[str, None]] = {}
    texts = stage.placements.parameters if stage.placements is not None else {}
    for name, text in sorted(texts.items(), key=lambda each: "S" not in each[1]):
        found.setdefault(text, {})[re.sub(r"(?<=\.)\d+(?=\.)", "*", name)] = None
    return {text: list(names) for text, names in found.items()}


def _words(redistribution: Redistribution) -> str:
    moving = (s for s in redistribution.steps if s.collective is not Collective.SLICE)
    return ", ".join(dict.fromkeys(step.collective.value for step in moving))


def _stages_of_values(plan: Plan, division: Division) -> dict[str, int]:
    return dict(_pairs(plan, division))


def _pairs(plan: Plan, division: Division) -> Iterator[tuple[str, int]]:
    stages, nodes = plan.stage_of, division.profile.nodes
    for call in reversed(division.assignment.graph.calls):
        yield from ((value, stages[nodes[call.name]]) for value in call.reads)
    for call in division.assignment.graph.calls:
        yield from ((v, stages[nodes[call.name]]) for v in call.results if v is not None)
