"""The graph to plan, its profile, and the runs to correct it by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipedream.graph.choices import DEFAULT_ORDER
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.profile import Footprint, Profile, TrainingOverheads
from pipedream.optimizer.calibrate.further_profiles import at_their_mean, levels_of
from pipedream.optimizer.calibrate.runs import CalibrationRun
from pipedream.optimizer.cli.inputs import graph_of, profile_of
from pipedream.optimizer.cli.options import Options

_WHOLE_PASSES = (None, DEFAULT_ORDER, "interleaved")
"""Orders whose backward passes are not in halves."""


def read_model(options: Options) -> tuple[Graph, Profile | None, Sequence[CalibrationRun]]:
    """Reads the graph, its profile, and the runs to correct its times by. Raises UserError."""
    graph = graph_of(options)
    runs = [CalibrationRun.read(folder) for folder in options.calibrate]
    profile = profile_of(options, graph)
    if profile is not None:
        graph = profile.updated_by(options.optimizer, profile.divide_backward(graph))
    graph = at_their_mean(graph, _further_levels(options, graph, profile))
    for run in runs:
        run.check(graph, options.graph_path, options.profile_path, profile)
    return graph, profile, runs


def _further_levels(options: Options, graph: Graph, profile: Profile | None) -> tuple[float, ...]:
    """Returns how slow the machine was in each profile of --again. Raises UserError."""
    if not options.again:
        return ()
    if profile is None:
        raise UserError(
            f"--again {options.again[0]}: there is no {options.profile_path} of this graph to"
            " compare with: run pd-profile again"
        )
    return levels_of(profile, graph, options.again)


def overheads_of(
    options: Options, graph: Graph, profile: Profile | None
) -> TrainingOverheads | None:
    """Returns the costs of training that were profiled, and how sure all times are."""
    if profile is None or profile.footprints is None:
        return None
    found = profile.training_overheads
    others = _further_levels(options, graph, profile)
    return replace(found, uncertainty=found.uncertainty._replace(others=others))


def footprints_of(options: Options, profile: Profile | None) -> Mapping[str, Footprint] | None:
    """Returns what nodes keep in memory, in whole passes or in halves."""
    footprints = None if profile is None else profile.footprints
    if footprints is None or options.order in _WHOLE_PASSES:
        return footprints
    return {name: each.in_programs for name, each in footprints.items()}
