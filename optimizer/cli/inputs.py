"""The model that options name: its graph, profile and operators, from files or from memory."""

from __future__ import annotations

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, format_graph, parse_graph, read_graph
from pipedream.graph.placements.operators import OperatorProfile, read_operators
from pipedream.graph.profile import Profile, read_profile, read_profile_of
from pipedream.optimizer.cli.options import ModelInMemory, Options


def graph_of(options: Options) -> Graph:
    """Returns the graph, rounded as in graph.txt if it is in memory. Raises UserError."""
    if isinstance(options.graph, ModelInMemory):
        return parse_graph(format_graph(options.graph.graph))
    return read_graph(options.graph)


def profile_of(options: Options, graph: Graph) -> Profile | None:
    """The profile that was asked for or that an export needs; else that which came with the graph,
    if it belongs to this graph. Raises UserError.
    """
    path = options.profile_path
    if options.profile is None and isinstance(options.graph, ModelInMemory):
        return options.graph.profile
    if options.profile is None and not options.export:
        if not path.exists():
            return None
        profile = read_profile(path)  # one that cannot be read is not left out without a word
        return profile if profile.is_of(graph) else None
    profile = read_profile_of(path, graph)
    if options.profile is not None and profile.footprints is None:
        raise UserError(f"--profile {options.profile}: has no memory figures: run pd-profile again")
    return profile


def any_profile(options: Options) -> Profile | None:
    """The profile, of whichever graph it is; None if there is none. Raises UserError."""
    if options.profile is None and isinstance(options.graph, ModelInMemory):
        return options.graph.profile
    return read_profile(options.profile_path) if options.profile_path.exists() else None


def has_profile(options: Options) -> bool:
    """Whether there is one."""
    if options.profile is None and isinstance(options.graph, ModelInMemory):
        return options.graph.profile is not None
    return options.profile_path.exists()


def operators_of(options: Options) -> OperatorProfile | None:
    """The operators that came with the graph, or with the profile of an earlier plan; None if there
    are none. Raises UserError.
    """
    if isinstance(options.graph, ModelInMemory):
        return options.graph.operators
    for beside in (options.graph, options.profile_path):
        path = beside.with_name("operators.json")
        if path.exists():
            return read_operators(path)
    return None
