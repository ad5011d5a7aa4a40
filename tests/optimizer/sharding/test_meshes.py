"""pd-optimize --mesh: what one device of a team does, holds and sends, and the plan for teams."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from commands import typed
from sharded_runs import PROFILE, write_config

from pipedream.graph.cluster import Cluster, DeviceType, Link
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, read_graph
from pipedream.graph.placements.operators import OperatorProfile, flops, read_operators
from pipedream.graph.placements.placement import Mesh, Replicate, Shard
from pipedream.graph.placements.regions import held_region
from pipedream.graph.placements.requests import Requests
from pipedream.graph.plan import Plan, Predicted, read_plan
from pipedream.graph.profile import Profile, read_profile, write_profile
from pipedream.optimizer.cli.cluster_options import _of_speed
from pipedream.optimizer.sharding.model_sharding import ModelSharding
from pipedream.optimizer.sharding.table import traffic_table
from pipedream.optimizer.sharding.team_graph import team_footprints, team_graph
from pipedream.sharding.assignment import LinkedMesh, redistributions
from pipedream.sharding.propagate import propagate

FOUR = Cluster(machines=(4,), bandwidth=(1e9,))
SHARDS = ("*qkv=S(0, chunks=3)", "*up=S(0)", "*out=S(1)", "head=S(0)")
SHARD_WORDS = [word for text in SHARDS for word in ("--shard", text)]
OPTIONS = ("--machines", "4", "--bandwidth", "1GB", "--schedule", "flush", "--microbatches", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of a small transformer, with its operators and their run config."""
    folder = tmp_path_factory.mktemp("profiled")
    write_config(folder, "Fused", dtype="float32", evaluate_every=None)
    done = typed(folder, PROFILE)
    assert done.code == 0, done.error
    return folder


@pytest.fixture(scope="module")
def profiled(folder: Path) -> tuple[Graph, Profile, OperatorProfile]:
    profile = read_profile(folder / "profile.json")
    graph, operators = read_graph(folder / "graph.txt"), read_operators(folder / "operators.json")
    return profile.divide_backward(graph), profile, operators


def divided(
    profiled: tuple[Graph, Profile, OperatorProfile], mesh: Mesh, shards: Sequence[str] = SHARDS
) -> ModelSharding:
    return ModelSharding.of(mesh, shards, profiled[2], FOUR)


def optimize(folder: Path, *options: str) -> Plan:
    done = typed(folder, ["pd-optimize", "graph.txt", *OPTIONS, "-o", "plan", *options])
    assert done.code == 0, done.error
    return read_plan(folder / "plan/plan.json")


def test_devices_wait_for_the_slowest_of_their_mesh(folder: Path, tmp_path: Path) -> None:
    """A mesh was expected to be as fast as one device whose passes vary: those of two took 7 %
    longer, where passes of each vary by a tenth. E[max] of two that take 1 or 1.2 is 1.15.
    """
    known = read_profile(folder / "profile.json")
    for name in ("graph.txt", "operators.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    words = ("--machines", "2", "--mesh", "2", *SHARD_WORDS)

    def planned(**fields: object) -> Predicted:
        write_profile(known.model_copy(update=fields), tmp_path / "profile.json")
        return optimize(tmp_path, *words).predicted

    steady = planned(pass_seconds=(1.0,) * 200)
    assert steady.expected_seconds_per_minibatch == pytest.approx(steady.seconds_per_minibatch)
    drifting = (*[1.0] * 100, *[1.2] * 100)
    apart = (*[1.0] * 50, *[1.2] * 100, *[1.0] * 50)
    together = planned(pass_seconds=drifting, pass_seconds_beside=(drifting,))
    alone = planned(pass_seconds=drifting)
    waiting = planned(pass_seconds=drifting, pass_seconds_beside=(apart,))
    assert together.seconds_per_minibatch == pytest.approx(waiting.seconds_per_minibatch)
    one = alone.seconds_in_a_run
    assert together.seconds_in_a_run == pytest.approx(one)
    assert waiting.seconds_in_a_run == pytest.approx(one * (1 + 0.0912 / math.pi**0.5), rel=0.01)

    jumping = planned(pass_seconds=(1.0, 1.2) * 100)
    assert jumping.seconds_in_a_run > 1.04 * jumping.seconds_per_minibatch


@pytest.mark.slow
def test_one_device_is_what_it_was(profiled: tuple[Graph, Profile, OperatorProfile]) -> None:
    """On a mesh of one device all shards are the whole, and nothing is sent."""
    graph, profile, _ = profiled
    sharding = divided(profiled, (1,))
    assert team_graph(graph, profile, sharding).nodes == graph.nodes
    assert profile.footprints is not None
    kept = team_footprints(profile.footprints, sharding)
    drawing = {name for name, each in kept.items() if each.drawn}
    assert {graph.nodes[name].description.split("(")[0] for name in drawing} == {"Dropout"}
    own = {name: replace(each, drawn=0.0) for name, each in kept.items()}
    assert own == profile.footprints
    assert sharding.teams == FOUR


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_a_device_has_the_regions_of_its_parameters(
    profiled: tuple[Graph, Profile, OperatorProfile], mesh: Mesh
) -> None:
    graph, profile, _ = profiled
    shards = [f"{text},R" if len(mesh) == 2 else text for text in SHARDS]
    sharding = divided(profiled, mesh, shards)
    held = sum(
        4 * held_region(shape, mesh, sharding.parameters[name], 0).size
        for name, shape in sharding.shapes.items()
        if any(name in node.parameters for node in profile.nodes)
    )
    team = team_graph(graph, profile, sharding)
    assert sum(node.parameter_bytes for node in team.nodes.values()) == pytest.approx(held)
    assert held < 0.6 * sum(node.parameter_bytes for node in graph.nodes.values())


def test_teams_are_fewer_than_a_collective_was_measured_among(
    profiled: tuple[Graph, Profile, OperatorProfile],
) -> None:
    """Two machines of four: teams of two do not have what four devices took, machines do."""
    inner, outer = Link(latency=1e-6, bandwidth=1e9), Link(latency=1e-5, bandwidth=1e8)
    links = dict.fromkeys(("send", "all_reduce", "all_gather"), (inner, outer))
    cluster = Cluster(machines=(4, 2), bandwidth=(1e9, 1e8), **links)
    teams = ModelSharding.of((2,), SHARDS, profiled[2], cluster).teams
    assert teams.machines == (2, 2)
    assert teams.send == (inner, outer)
    assert teams.all_reduce == teams.all_gather == (None, outer)


def test_work_and_messages_are_those_of_the_operators(
    profiled: tuple[Graph, Profile, OperatorProfile],
) -> None:
    """What a device works and all that it sends is at some node."""
    graph, profile, operators = profiled
    sharding = divided(profiled, (2,))
    sent = sum(each.seconds for each in redistributions(sharding.assignment))
    worked = sum(
        operators.seconds[call.name] * sharding.work_share(call)
        for call in sharding.assignment.graph.calls
    )
    team = team_graph(graph, profile, sharding)
    assert sum(node.compute_seconds for node in team.nodes.values()) == pytest.approx(
        worked + sent, rel=0.02
    )


def test_products_are_divided_where_they_take_long(
    profiled: tuple[Graph, Profile, OperatorProfile],
) -> None:
    """As measured, some may take less than a message does, and are computed by all devices."""
    graph, profile, operators = profiled
    slow = operators.model_copy(update={"seconds": dict.fromkeys(operators.seconds, 0.1)})
    sharding = divided((graph, profile, slow), (2,))
    products = [call for call in sharding.assignment.graph.calls if flops(call.operator)]
    assert len(products) > 10
    assert {sharding.work_share(call) for call in products} == {0.5}


@pytest.mark.thorough
def test_what_is_added_up_within_operators_counts(tmp_path: Path) -> None:
    """Batch norms of a divided minibatch: at their layers, and in the table of what is sent."""
    write_config(tmp_path, "Convolutions", dtype="float32", evaluate_every=None)
    done = typed(tmp_path, PROFILE)
    assert done.code == 0, done.error
    profile, graph = read_profile(tmp_path / "profile.json"), read_graph(tmp_path / "graph.txt")
    operators = read_operators(tmp_path / "operators.json")
    asked = Requests({"*": (Replicate(),)}, {"input 0": (Shard(0),)})
    links = LinkedMesh((2,), (Link(bandwidth=1e9),))
    assignment = propagate(operators.graph, links, asked)
    sharding = ModelSharding(FOUR, operators, assignment)
    values = operators.graph.types()
    within = [each for each in redistributions(assignment) if each.value not in values]
    assert len(within) == 2 * 3, "of the two norms of pictures"
    costs = team_graph(graph, profile, sharding).nodes
    free = replace(assignment, mesh=LinkedMesh((2,), (Link(bandwidth=1e99),)))
    free_costs = team_graph(graph, profile, replace(sharding, assignment=free)).nodes
    for name in {operators.nodes[each.value] for each in within}:
        own = [each.seconds for each in within if operators.nodes[each.value] == name]
        more = costs[name].compute_seconds - free_costs[name].compute_seconds
        assert more >= 0.999 * sum(own) > 0
    plan = optimize(tmp_path, "--mesh", "2", "--shard", "*=R")
    table = traffic_table(plan, sharding)
    numbers = table.columns[[column.header for column in table.columns].index("number")]
    sent = [each for each in redistributions(assignment) if each.bytes]
    assert sum(int(str(cell)) for cell in numbers.cells) == len(sent)


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("options", "replicas", "ranks"),
    [
        (("--mesh", "4"), (1,), [(0, 1, 2, 3)]),
        (("--mesh", "2", "--straight"), (1, 1), [(0, 1), (2, 3)]),
        (("--mesh", "2,2"), (1,), [(0, 1, 2, 3)]),
    ],
)
def test_plans_for_teams(
    folder: Path, options: tuple[str, ...], replicas: tuple[int, ...], ranks: list[tuple[int, ...]]
) -> None:
    axes = 1 + options[1].count(",")
    shards = [f"{text}{',R' * (axes - 1)}" for text in SHARDS]
    words = [word for text in shards for word in ("--shard", text)]
    plan = optimize(folder, *options, *words)
    assert plan.replicas == replicas
    assert [stage.ranks for stage in plan.stages] == ranks
    assert plan.cluster == FOUR
    assert {stage.mesh for stage in plan.stages} == {tuple(map(int, options[1].split(",")))}
    placed = {
        name: text
        for stage in plan.stages
        if stage.placements is not None
        for name, text in stage.placements.parameters.items()
    }
    assert placed["blocks.0.attention.qkv.weight"] == "S(0, chunks=3)" + ",R" * (axes - 1)
    assert plan.asked is not None
    assert plan.asked.shard == tuple(shards)


@pytest.mark.slow
@pytest.mark.parametrize("cost_model", ["network", "measured"])
def test_a_mesh_is_compared_with_whole_models(folder: Path, cost_model: str) -> None:
    """One worker, and data parallelism: what plans without meshes say of them."""
    words = ("--cost-model", cost_model)
    one, other = (
        optimize(folder, *words, *mesh).predicted
        for mesh in (("--mesh", "2", *SHARD_WORDS), ("--intra-op", "none"))
    )
    assert one.one_worker_seconds == pytest.approx(other.one_worker_seconds)
    assert one.data_parallel_seconds == pytest.approx(other.data_parallel_seconds)


@pytest.mark.slow
def test_a_plan_for_teams_trains(folder: Path) -> None:
    """From the profile to a trained model, with no more than the commands."""
    optimize(folder, "--mesh", "2", "--straight", *SHARD_WORDS)
    done = typed(folder, ["pd-train", "plan/plan.json", "--config", "run.yaml", "-o", "run"])
    assert done.code == 0, done.error
    losses = [json.loads(line)["loss"] for line in (folder / "run/metrics.jsonl").open()]
    assert all(map(math.isfinite, losses))


@pytest.mark.slow
def test_the_report_says_what_is_placed_how(folder: Path) -> None:
    words = ["--mesh", "2", *SHARD_WORDS]
    done = typed(folder, ["pd-optimize", "graph.txt", *OPTIONS, "-o", "plan", *words])
    (fused,) = (line for line in done.out.splitlines() if " S(0, chunks=3) " in line)
    assert "blocks.*.attention.qkv.weight" in fused
    assert "Communication between the devices of a worker" in done.out
    assert "all-reduce" in done.out


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--mesh", "0"], "--mesh 0: write the size of each axis, such as 2 or 2,4"),
        (["--mesh", "two"], "--mesh two: write the size of each axis"),
        (["--mesh", "3"], "--mesh: teams of 3 devices do not divide the 4 of the innermost level"),
        (["--mesh", "8"], "--mesh: teams of 8 devices do not divide the 4 of the innermost level"),
        (["--shard", "*up=S(0)"], "--shard needs --mesh: add --mesh 2, or leave it out"),
        (["--mesh", "2", "--shard", "up"], "--shard up: write PATTERN=PLACEMENTS"),
        (["--mesh", "2", "--shard", "=S(0)"], "--shard =S(0): write PATTERN=PLACEMENTS"),
        (["--mesh", "2", "--shard", "*upp=S(0)"], "parameters.*upp: no parameter has this name"),
        (["--mesh", "2", "--shard", "*up=S(0),R"], "2 placements for a mesh of 1 axes"),
        (["--mesh", "2", "--shard", "*up=Q"], "'Q' is no placement"),
        (["--mesh", "2", "--shard", "*up=P"], "P is a sum, which only operators can give"),
        (["--mesh", "2", "--shard", "*up=S(7)"], "cannot be placed S(7)"),
        (["--mesh", "2", "--shard", "*up=S(0, chunks=7)"], "are not 7 equal chunks"),
        (["--mesh", "2", "--profile", "none.json"], "none.json"),
        (
            ["--mesh", "2", "--intra-op", "propagate"],
            "--mesh: nothing is divided among the 2 devices of a team",
        ),
        (
            ["--mesh", "2,2", "--intra-op", "propagate"],
            "which would all do the same: say which parameters are, with --shard",
        ),
        (
            ["--intra-op", "exact", "--straight"],
            "--intra-op exact seeks the mesh of each stage, and --straight says what stages are",
        ),
        (["--mesh", "2", "--intra-op", "none"], "--intra-op none divides no operators, which is"),
    ],
)
def test_mistakes_are_told_in_one_line(folder: Path, options: list[str], told: str) -> None:
    done = typed(folder, ["pd-optimize", "graph.txt", *OPTIONS, "-o", "wrong", *options])
    assert done.code == 2
    (line,) = done.error.splitlines()
    assert line.startswith("pd-optimize: ")
    assert told in line, line


@pytest.mark.slow
def test_operators_are_needed_and_have_to_be_of_the_graph(folder: Path, tmp_path: Path) -> None:
    for name in ("graph.txt", "profile.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    words = ["pd-optimize", "graph.txt", *OPTIONS, "--mesh", "2"]
    assert "there is no operators.json: pd-profile writes it" in typed(tmp_path, words).error
    operators = json.loads((folder / "operators.json").read_text()) | {"fingerprint": "another"}
    (tmp_path / "operators.json").write_text(json.dumps(operators))
    assert "the operators of another graph: run pd-profile again" in typed(tmp_path, words).error


def test_what_stands_in_the_way_of_a_mesh_is_told_again(folder: Path, tmp_path: Path) -> None:
    """pd-profile knows why there is no operators.json."""
    profile = json.loads((folder / "profile.json").read_text())
    (tmp_path / "graph.txt").write_text((folder / "graph.txt").read_text())
    (tmp_path / "profile.json").write_text(json.dumps(profile | {"no_operators": "it draws lots"}))
    said = typed(tmp_path, ["pd-optimize", "graph.txt", *OPTIONS, "--mesh", "2"]).error
    assert "the model cannot run on a mesh: it draws lots; plan it without --mesh" in said


def test_faster_devices_compute_faster_and_send_as_before(
    profiled: tuple[Graph, Profile, OperatorProfile],
) -> None:
    """The seconds of a device: a tenth of its work, and all of its messages."""
    graph, profile, _ = profiled
    fast = ModelSharding.of((2,), SHARDS, profiled[2], _of_speed(FOUR, 10))
    same = replace(fast, cluster=FOUR)
    sent = sum(each.seconds for each in redistributions(fast.assignment))
    slow, quick = (
        sum(node.compute_seconds for node in team_graph(graph, profile, each).nodes.values())
        for each in (same, fast)
    )
    assert quick / 10 == pytest.approx((slow - sent) / 10 + sent)
    assert fast.flops_per_second == pytest.approx(10 * same.flops_per_second)


@pytest.mark.slow
def test_the_report_of_faster_devices(folder: Path) -> None:
    """What takes a tenth is computing alone, also in the picture; graph.txt stays as profiled."""
    plan = optimize(folder, "--mesh", "2", *SHARD_WORDS, "--speed", "10")
    alone = optimize(folder, "--intra-op", "none", "--speed", "10")
    assert plan.predicted.one_worker_seconds == pytest.approx(alone.predicted.one_worker_seconds)
    assert [kind.speed for kind in plan.cluster.kinds] == [10]
    written = read_graph(folder / "plan/graph.txt")
    before = read_graph(folder / "graph.txt")
    assert written.arrays.forward == pytest.approx(before.arrays.forward)


def test_devices_of_a_team_are_alike(profiled: tuple[Graph, Profile, OperatorProfile]) -> None:
    kinds = (DeviceType(name="a", memory=1e9), DeviceType(name="b", memory=2e9))
    names = ("a", "a", "b", "b")
    four = FOUR.model_copy(update={"kinds": kinds, "machine_kinds": names})
    assert ModelSharding.of((2,), SHARDS, profiled[2], four).teams.machine_kinds == ("a", "b")
    with pytest.raises(UserError, match="devices of a team would be of several types, a and b"):
        ModelSharding.of((4,), SHARDS, profiled[2], four)
    faster = (kinds[0], DeviceType(name="b", speed=2.0))
    with pytest.raises(UserError, match="have several speeds, 1 and 2"):
        ModelSharding.of((2,), SHARDS, profiled[2], four.model_copy(update={"kinds": faster}))


@pytest.mark.slow
def test_the_picture_says_how_parameters_are_divided(folder: Path) -> None:
    optimize(folder, "--mesh", "2", *SHARD_WORDS)
    text = next((folder / "plan").glob("graph.[gs]v*")).read_text()
    assert "weight S(0, chunks=3), bias S(0, chunks=3)" in text


def test_what_a_backward_pass_allocates_is_divided(
    profiled: tuple[Graph, Profile, OperatorProfile],
) -> None:
    """The gradient of a weight that is divided is the largest tensor of its layer's pass."""
    _, profile, _ = profiled
    assert profile.footprints is not None
    team = team_footprints(profile.footprints, divided(profiled, (2,)))
    (up,) = (node.id for node in profile.nodes if "blocks.0.up.weight" in node.parameters)
    whole = profile.footprints[up].workspace
    assert 0.4 * whole < team[up].workspace < 0.8 * whole


@pytest.mark.slow
def test_why_no_shardings_were_sought(folder: Path) -> None:
    """Over links that take no time replicas share the work out; nobody is sent to look where they
    have just had it looked.
    """
    fast = ("--machines", "4", "--bandwidth", "1000TB", "--latency", "0us", "--schedule", "flush")
    said = {}
    for intra_op in ("auto", "exact"):
        options = ("--microbatches", "4096", "--intra-op", intra_op, "--update-rate", "1000TB")
        done = typed(folder, ["pd-optimize", "graph.txt", *fast, *options, "-o", "plan"])
        assert done.code == 0, done.error
        said[intra_op] = " ".join(done.out.split())
    assert "Operators not divided: that could save" in said["auto"]
    assert "if it took no messages; --intra-op exact seeks it." in said["auto"]
    assert "exact seeks it" not in said["exact"]
