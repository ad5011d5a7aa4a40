"""Whether the operators inside stages may be divided, and on which mesh."""

from __future__ import annotations

from dataclasses import replace

from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph
from pipedream.graph.placements.operators import OperatorProfile
from pipedream.graph.placements.placement import Mesh, device_count
from pipedream.graph.profile import Profile
from pipedream.optimizer.cli.cluster_options import cluster_of
from pipedream.optimizer.cli.inputs import operators_of
from pipedream.optimizer.cli.options import Options
from pipedream.optimizer.cost.models import DEFAULT_COST_MODEL


def operators_asked(
    options: Options, graph: Graph, profile: Profile | None
) -> OperatorProfile | None:
    """Returns the operators of the graph, if they may be divided and are wanted. Raises UserError
    where they are asked for and cannot be had.
    """
    asked = _asks_for_operators(options)
    if asked and options.optimizer == "muon":
        raise UserError(
            f"{asked}: divides matrices, and muon has to see them whole: leave"
            f" {asked.split()[0]} out, or give --optimizer adam"
        )
    told = _told_stages(options)
    if asked and told and options.mesh is None:
        raise UserError(
            f"{asked} seeks the mesh of each stage, and {told} says what stages are: give one"
            " --mesh for all, or leave one of them out"
        )
    if options.intra_op == "none" or not (asked or _may_be_divided(options)):
        return None
    if profile is not None and profile.no_operators is not None and asked:
        raise UserError(
            f"{asked}: the model cannot run on a mesh: {profile.no_operators}; plan it without"
            f" {asked.split()[0]}"
        )
    path = options.graph_path.with_name("operators.json")
    operators = None if profile is None else operators_of(options)
    if operators is None and asked:
        raise UserError(
            f"{asked}: there is no {path if profile else options.profile_path}: pd-profile writes"
            " it with graph.txt"
        )
    if operators is None or operators.fingerprint == graph.fingerprint:
        return operators
    if asked:
        raise UserError(f"{path}: the operators of another graph: run pd-profile again")
    return None


def _asks_for_operators(options: Options) -> str | None:
    """Returns the option that says that operators are to be divided. Raises UserError if options
    contradict each other.
    """
    if options.mesh is None and options.shard:
        raise UserError("--shard needs --mesh: add --mesh 2, or leave it out")
    if options.mesh is not None:
        if options.intra_op == "none":
            raise UserError(
                "--intra-op none divides no operators, which is what --mesh is for: leave one out"
            )
        return "--mesh"
    return f"--intra-op {options.intra_op}" if options.intra_op not in ("auto", "none") else None


def _may_be_divided(options: Options) -> bool:
    """Whether --intra-op auto looks for shardings: not where the user says what the stages are, or
    takes another cost model.
    """
    whole = options.optimizer == "muon"  # which sees no parts of a matrix
    return (
        _told_stages(options) is None
        and not whole
        and options.cost_model in (None, DEFAULT_COST_MODEL)
    )


def _told_stages(options: Options) -> str | None:
    """Returns the option by which the user says what stages are, if any."""
    given = {
        "--split": options.split,
        "--replicas": options.replicas,
        "--order": options.order,
        "--straight": options.straight,
    }
    return next((name for name, value in given.items() if value), None)


def parse_mesh(text: str) -> Mesh:
    """The sizes of the axes of --mesh. Raises UserError."""
    try:
        sizes = tuple(map(int, text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UserError(f"--mesh {text}: write the size of each axis, such as 2 or 2,4")
    return sizes


def with_fitting_mesh(options: Options) -> Options:
    """Without the mesh of an earlier plan, where its teams do not divide the cluster that there is
    now: then the best one is searched. Raises UserError.
    """
    if options.mesh is None or "mesh" in options.typed:
        return options
    if cluster_of(options).machines[0] % device_count(parse_mesh(options.mesh)) == 0:
        return options
    return replace(options, mesh=None, shard=())
