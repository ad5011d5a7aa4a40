"""Rounds a plan to whole modules, for frameworks that assign modules to stages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan
from pipedream.graph.profile import ProfiledNode
from pipedream.graph.units import show_seconds
from pipedream.optimizer.report.tables import show_count


@dataclass(frozen=True)
class ModuleSplit:
    """The modules of each stage in order of execution, and notes for the user."""

    stages: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


class Layering:
    """The modules between which a model can be cut: the entries of its outermost lists of layers
    (`layers.0`, `features.3`) and the modules beside these lists.

    `unit_of` maps each node to its module; None for inputs, and for operators in the code of a
    model or module that is itself divided.
    """

    def __init__(self, graph: Graph, calls: Mapping[str, ProfiledNode]) -> None:
        paths = [call.module for call in calls.values()]
        self.lists = _outermost_lists(paths)
        opened = {prefix for path in self.lists for prefix in _prefixes(path)} | {""}
        self.unit_of = {
            name: None if graph.nodes[name].is_input else _unit(calls[name].module, opened)
            for name in graph.order
        }

    @property
    def units(self) -> tuple[str, ...]:
        """The modules in order of execution."""
        return tuple(dict.fromkeys(unit for unit in self.unit_of.values() if unit is not None))


def split_modules(
    plan: Plan,
    graph: Graph,
    calls: Mapping[str, ProfiledNode],
    label: Callable[[Layering], Mapping[str, str]] | None = None,
) -> ModuleSplit:
    """Rounds the cuts of the plan to whole modules: each goes to the stage with most of its time.

    `label` merges units of a `Layering` by giving them the same name. Raises UserError if a stage
    is left without a module, or a tensor would have to skip a stage.
    """
    layering = Layering(graph, calls)
    labels = label(layering) if label else {unit: unit for unit in layering.units}
    unit_of = {name: labels[unit] for name, unit in layering.unit_of.items() if unit is not None}
    stage_of = _rounded(plan, graph, unit_of)
    stages = tuple(
        tuple(unit for unit, stage in stage_of.items() if stage == position)
        for position in range(len(plan.stages))
    )
    for position, modules in enumerate(stages):
        if not modules:
            raise UserError(
                f"stage {position} of the plan does not contain most of any module, and only"
                " whole ones can be given to it; plan for fewer machines"
            )
    moved = _placed(plan, graph, {name: stage_of[unit] for name, unit in unit_of.items()})
    _check_links(graph, unit_of, moved)
    notes = (*_loss(plan, graph, moved), *_glue(graph, layering), *_shared(calls, moved))
    return ModuleSplit(stages, (*notes, *_widths(graph, moved, len(stages)), *uneven(plan)))


def uneven(plan: Plan) -> Iterable[str]:
    """Yields a note if stages have different numbers of replicas."""
    if len(set(plan.replicas)) > 1:
        counts = ", ".join(map(str, plan.replicas))
        yield f"replicas {counts} are left out: it has the same number of every stage"


def _outermost_lists(paths: Iterable[str]) -> tuple[str, ...]:
    """Returns the outermost paths with two or more numbered children."""
    children: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        parts = path.split(".")
        for depth, part in enumerate(parts):
            if part.isdigit():
                children[".".join(parts[:depth])].add(part)
    lists = {path for path, numbers in children.items() if len(numbers) > 1}
    return tuple(sorted(path for path in lists if lists.isdisjoint(_prefixes(path)[:-1])))


def _prefixes(path: str) -> list[str]:
    """Returns "", `a` and `a.b` of `a.b`."""
    parts = path.split(".") if path else []
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def _unit(path: str, opened: set[str]) -> str | None:
    """Returns the outermost undivided module around this path; None if all are divided."""
    return next((prefix for prefix in _prefixes(path) if prefix not in opened), None)


def _rounded(plan: Plan, graph: Graph, unit_of: Mapping[str, str]) -> dict[str, int]:
    """Returns the stage of each unit, never before that of a unit that runs earlier."""
    seconds: dict[str, Counter[int]] = {}
    for name, unit in unit_of.items():
        share = graph.nodes[name].compute_seconds + 1e-12  # nodes without time count, too
        seconds.setdefault(unit, Counter())[plan.stage_of[name]] += share  # type: ignore[assignment]
    stage_of, reached = {}, 0
    for unit, shares in seconds.items():
        reached = max(reached, max(shares, key=lambda stage: (shares[stage], -stage)))
        stage_of[unit] = reached
    return stage_of


def _placed(plan: Plan, graph: Graph, stage_of: Mapping[str, int]) -> dict[str, int]:
    """Returns the stage of every node: as planned, as far as producers and readers allow."""
    placed = dict(stage_of)
    for name in graph.order:
        if name not in placed:
            readers = (stage_of[n] for n in graph.successors[name] if n in stage_of)
            planned = min([plan.stage_of[name], *readers])
            placed[name] = max([planned, *(placed[n] for n in graph.predecessors[name])])
    return placed


def _check_links(graph: Graph, unit_of: Mapping[str, str], stage_of: Mapping[str, int]) -> None:
    for source, target in graph.edges:
        if graph.nodes[source].is_input:
            continue
        passed = stage_of[target] - stage_of[source]
        if passed > 1:
            raise UserError(
                f"{_name(graph, source)} of stage {stage_of[source]} is read in stage"
                f" {stage_of[target]}, and tensors can pass only to the next stage;"
                " plan for fewer machines, or export to torch"
            )
        if passed < 0 and source in unit_of and target in unit_of:
            raise UserError(
                f"{_name(graph, source)} comes before {_name(graph, target)} but its module would"
                " be in a later stage; export to torch"
            )


def _name(graph: Graph, node: str) -> str:
    return f"{node} {graph.nodes[node].description.partition('(')[0]}"


def _loss(plan: Plan, graph: Graph, stage_of: Mapping[str, int]) -> Iterable[str]:
    """Yields a note on what rounding costs, if anything."""
    moved = sum(plan.stage_of[name] != stage for name, stage in stage_of.items())
    if not moved:
        return
    after = [0.0] * len(plan.stages)
    for name, stage in stage_of.items():
        after[stage] += graph.nodes[name].compute_seconds / plan.stages[stage].replicas
    before = max(stage.compute_seconds / stage.replicas for stage in plan.stages)
    yield (
        f"cuts are rounded to whole modules: {show_count(moved, 'node')} moved, the slowest stage"
        f" computes {show_seconds(max(after))} for a minibatch, planned {show_seconds(before)}"
    )


def _glue(graph: Graph, layering: Layering) -> Iterable[str]:
    unit_of, nodes = layering.unit_of, graph.nodes
    loose = [name for name, unit in unit_of.items() if unit is None and not nodes[name].is_input]
    if loose:
        names = ", ".join(_name(graph, name) for name in loose[:3])
        yield (
            f"{show_count(len(loose), 'operator')} in the code around the modules"
            f" ({names}{', ...' if len(loose) > 3 else ''}) must be in the forward of their stage"
        )


def _shared(calls: Mapping[str, ProfiledNode], stage_of: Mapping[str, int]) -> Iterable[str]:
    stages: dict[str, set[int]] = defaultdict(set)
    for name, call in calls.items():
        for parameter in call.parameters:
            stages[parameter].add(stage_of[name])
    for parameter, holders in stages.items():
        if len(holders) > 1:
            listed = " and ".join(map(str, sorted(holders)))
            yield f"{parameter} is read by stages {listed}: tie it there"


def _widths(graph: Graph, stage_of: Mapping[str, int], stages: int) -> Iterable[str]:
    crossing = {source for source, target in graph.edges if stage_of[source] != stage_of[target]}
    sent = Counter(stage_of[name] for name in crossing if not graph.nodes[name].is_input)
    for stage in range(stages):
        if sent[stage] > 1:
            yield f"{sent[stage]} tensors go from stage {stage} to {stage + 1}"
    inputs = {s for s, target in graph.edges if graph.nodes[s].is_input and stage_of[target]}
    if inputs:
        yield f"later stages read {show_count(len(inputs), 'input')} of the model"
