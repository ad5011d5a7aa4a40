"""Stages that the user gives, and groups of nodes that none of them cuts."""

from __future__ import annotations

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.placements.operators import OperatorProfile
from pipedream.graph.profile import Profile
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.cuts.groups import classes_of, fusion_groups, whole_modules
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.split import Split, split_of


def split_asked(options: Options, graph: Graph, profile: Profile | None) -> Split | None:
    """Returns the stages that --split and --replicas give. Raises UserError."""
    if options.split is None and options.replicas is None:
        return None
    option = "--split" if options.split is not None else "--replicas"
    others = {
        "--straight": options.straight,
        "--fewer-machines": options.fewer_machines,
        "--layers": options.layers,
        "--epsilon": options.epsilon,
        "--sweep": options.sweep,
        f"--cost-model {options.cost_model}": options.cost_model not in (None, "network"),
    }
    for other in filter(others.get, others):
        raise UserError(f"{option} says what the stages are, to be simulated: leave out {other}")
    names = tuple(name.strip() for name in (options.split or "").split(",") if name.strip())
    try:
        counts = None if options.replicas is None else list(map(int, options.replicas.split(",")))
    except ValueError:
        counts = [0]
    if counts is not None and min(counts) < 1:
        raise UserError(f"--replicas {options.replicas}: write a number for each stage: 2,1,1")
    return split_of(names, counts, graph, {} if profile is None else profile.modules)


def groups_of(
    options: Options, graph: Graph, operators: OperatorProfile | None, profile: Profile | None
) -> tuple[tuple[str, ...], ...]:
    """Returns the groups of nodes that --group keeps whole. Raises UserError."""
    if options.group == "none":
        return ()
    option = "--split" if options.split is not None else "--replicas"
    if options.split is not None or options.replicas is not None:
        raise UserError(f"{option} says what the stages are: leave out --group {options.group}")
    planning = PlanningGraph.of(graph)
    if options.group == "fusion":
        return fusion_groups(planning, classes_of(graph, operators))
    if profile is None:
        raise UserError(
            "--group module: needs the profile.json beside graph.txt, which names the modules: run"
            " pd-profile, or leave it out"
        )
    return whole_modules(planning, profile.modules)
