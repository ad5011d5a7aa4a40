"""What the axes of a mesh divide, and the messages that take longest, in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import make_plan

from pipedream.graph.cluster import Cluster, Link
from pipedream.graph.model import read_graph
from pipedream.graph.placements.operators import read_operators
from pipedream.graph.placements.placement import Mesh, Placements, Replicate, Shard
from pipedream.graph.placements.requests import Requests
from pipedream.graph.profile import Profile, read_profile
from pipedream.optimizer.sharding.axes import axis_words
from pipedream.optimizer.sharding.model_sharding import ModelSharding
from pipedream.optimizer.sharding.table import heaviest_table, notes
from pipedream.sharding.assignment import LinkedMesh, redistributions
from pipedream.sharding.propagate import propagate

FOUR = Cluster(machines=(4,), bandwidth=(1e9,))
R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture
def profile(perceptron: Path) -> Profile:
    return read_profile(perceptron / "profile.json")


def divided(
    perceptron: Path,
    mesh: Mesh,
    parameters: dict[str, Placements],
    values: dict[str, Placements] | None = None,
) -> ModelSharding:
    """The perceptron's operators with these placements, and what follows from them."""
    operators = read_operators(perceptron / "operators.json")
    linked = LinkedMesh(mesh, (Link(bandwidth=1e12),) * len(mesh))
    assignment = propagate(operators.graph, linked, Requests(parameters, values or {}))
    return ModelSharding(FOUR, operators, assignment)


def words(sharding: ModelSharding, profile: Profile) -> str:
    return axis_words(sharding, profile, {node.id for node in profile.nodes})


def test_examples(perceptron: Path, profile: Profile) -> None:
    """With whole parameters what devices divide are examples; an axis may divide nothing."""
    sharding = divided(perceptron, (2,), {"*": (R,)}, {"input 0": (S0,)})
    assert words(sharding, profile) == "axis 0 of 2: examples of 3 layers"
    two = divided(perceptron, (2, 3), {"*": (R, R)}, {"input 0": (S0, R)})
    assert words(two, profile) == "axis 0 of 2: examples of 3 layers; axis 1 of 3: 3 whole"


def test_features(perceptron: Path, profile: Profile) -> None:
    """The second layer gives terms of sums over the features that it reads."""
    placed = {"0.*": (S0,), "2.weight": (S1,), "*": (R,)}
    sharding = divided(perceptron, (2,), placed)
    assert words(sharding, profile).startswith("axis 0 of 2: features of 2 layers")
    first = {profile.nodes[1].id}
    assert axis_words(sharding, profile, first) == "axis 0 of 2: features of 1 layer"
    assert axis_words(sharding, profile, {profile.nodes[2].id}) == "axis 0 of 2: no layers"


def test_parameters_in_parts(perceptron: Path, profile: Profile) -> None:
    """They are gathered for the work, which is divided otherwise."""
    parts = {"*.weight": (S0, R), "*": (R, R)}
    sharding = divided(perceptron, (2, 2), parts, {"input 0": (S0, S0)})
    for node in profile.nodes:
        if node.parameters:
            said = axis_words(sharding, profile, {node.id})
            first, second = said.split("; ")
            if "features" not in first:
                assert first.endswith("with parameters kept in parts")
            assert "parts" not in second
    assert "examples of" in words(sharding, profile)


def test_the_heaviest_messages_are_those_of_the_plan(perceptron: Path, profile: Profile) -> None:
    graph = read_graph(perceptron / "graph.txt")
    made = make_plan(graph, [list(graph.order)], [1])
    on_mesh = (stage.model_copy(update={"mesh": (2,)}) for stage in made.stages)
    plan = made.model_copy(update={"stages": tuple(on_mesh)})
    sharding = divided(perceptron, (2,), {"*": (R,)}, {"input 0": (S0,)})
    table = heaviest_table(plan, sharding, profile)
    columns = {column.header: list(map(str, column.cells)) for column in table.columns}
    sent = [each for each in redistributions(sharding.assignment) if each.bytes]
    gradients = [each for each in sent if each.often == "update"]
    assert len(gradients) == 6, "of three weights and three biases"
    shown = dict(zip(columns["value"], columns["bytes"], strict=True))
    assert shown["gradient of *.weight"] == "3.2 kB"  # 400 elements of 8 bytes
    number = dict(zip(columns["value"], columns["number"], strict=True))
    assert number["gradient of *.weight"] == number["gradient of *.bias"] == "3"
    assert columns["from -> to"][0] == "P -> R"
    assert sum(map(int, columns["number"])) == len(sent)


def test_the_picture_has_what_nodes_give(perceptron: Path, profile: Profile) -> None:
    examples = notes(divided(perceptron, (2,), {"*": (R,)}, {"input 0": (S0,)}), profile)
    layers = [node.id for node in profile.nodes if node.parameters]
    assert [examples[layer] for layer in layers[:2]] == ["gives S(0)"] * 2
    placed: dict[str, Placements] = {"0.*": (S0,), "2.weight": (S1,), "*": (R,)}
    features = notes(divided(perceptron, (2,), placed), profile)
    assert features[layers[0]] == "weight S(0), bias S(0); gives S(1)"
    whole = notes(divided(perceptron, (2,), {"*": (R,)}, {"input 0": (R,)}), profile)
    assert whole == {}
