from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from profiled import profile_of, seconds
from torch import Tensor, nn

from pipedream.capture.sources.load import Loaded
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node
from pipedream.graph.profile import read_profile, write_profile
from pipedream.profiler.assembly import Measured, Settings
from pipedream.profiler.measure import measure
from pipedream.profiler.timing.stopping_rule import StoppingRule


class Tied(nn.Module):
    """Tokens to logits over the same table: one weight read by two nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.words(tokens)) @ self.words.weight.T  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def measured() -> Measured:
    threads = torch.get_num_threads()
    settings = Settings("tied", {"a": [1]}, 2, torch.device("cpu"), StoppingRule(1, 3), threads)
    return measure(Loaded(Tied(), (torch.tensor([[1, 2, 3], [0, 0, 5]]),)), settings)


@pytest.mark.thorough
def test_profile_has_what_graph_txt_has_no_room_for(measured: Measured) -> None:
    graph, profile = measured.graph, measured.profile
    assert [node.id for node in profile.nodes] == list(graph.nodes)
    by_op = {node.op: node for node in profile.nodes}
    words, norm = by_op["Embedding"], by_op["LayerNorm"]
    assert (words.module, words.parameters) == ("words", ("words.weight",))
    assert (norm.module, norm.parameters) == ("norm", ("norm.weight", "norm.bias"))
    assert norm.inputs == (words.id,)
    (tensor,) = words.outputs
    assert (tensor.shape, tensor.dtype, tensor.bytes) == ((2, 3, 4), "float32", 96)
    assert tensor.requires_grad
    (tokens,) = by_op["Input0"].outputs
    assert (tokens.dtype, tokens.requires_grad) == ("int64", False)
    last = profile.nodes[-1]
    assert last.outputs[0].shape == (2, 3, 6), "what the model returns leaves its node"
    assert sum("words.weight" in node.parameters for node in profile.nodes) == 2


@pytest.mark.slow
def test_profile_agrees_with_the_graph(measured: Measured) -> None:
    graph, profile = measured.graph, measured.profile
    assert profile.graph_fingerprint == graph.fingerprint
    for node in profile.nodes:
        assert graph.nodes[node.id].forward_seconds == node.forward_seconds.median
        assert graph.nodes[node.id].backward_seconds == node.backward_seconds.median
        times = (node.forward_seconds, node.backward_seconds)
        assert all(time.lower <= time.median <= time.upper for time in times)
    totals = profile.totals
    assert totals.parameter_bytes == 4 * (6 * 4 + 4 + 4), "the shared weight counts once"
    assert totals.forward_seconds == pytest.approx(
        sum(node.forward_seconds for node in graph.nodes.values())
    )
    assert totals.backward_seconds > 0


def test_profile_says_where_it_was_measured(measured: Measured) -> None:
    profile = measured.profile
    assert (profile.model, profile.args, profile.batch_size) == ("tied", {"a": [1]}, 2)
    assert (profile.warmup, profile.repeats) == (1, 3)
    machine = profile.machine
    assert (machine.device, machine.threads) == ("cpu", torch.get_num_threads())
    assert machine.torch == torch.__version__
    assert machine.device_name


def test_profile_reads_back_as_written(measured: Measured, tmp_path: Path) -> None:
    write_profile(measured.profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == measured.profile


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "pipedream-profile/0"}, "not one of the choices: write 'pipedream-profile/1'"),
        ({"format": "pipedream-plan/1"}, "this is a plan: pd-train takes it as PLAN"),
        ({"batch_size": 0}, "batch_size: "),
        ({"nodes": [{"id": "node1"}]}, "nodes.0.description: is missing"),
        ({"weather": "fine"}, "weather: unknown field"),
    ],
)
def test_a_wrong_file_is_one_line(
    measured: Measured, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(measured.profile.model_dump_json()), **change}))
    with pytest.raises(UserError) as caught:
        read_profile(path)
    assert str(path) in caught.value.message
    assert told in caught.value.message


@pytest.mark.thorough
def test_a_lower_precision_is_profiled_as_it_will_be_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    threads = torch.get_num_threads()
    settings = Settings("low", {}, 8, torch.device("cpu"), StoppingRule(1, 1), threads)
    profile = measure(Loaded(model, (torch.randn(8, 4),), autocast="bfloat16"), settings).profile
    linear = [node for node in profile.nodes if node.op == "Linear"]
    assert [node.outputs[0].dtype for node in linear] == ["bfloat16", "bfloat16"]
    assert linear[0].outputs[0].bytes == 8 * 4 * 2


def test_how_backward_passes_divide_is_added_to_the_graph() -> None:
    """The loss, in the last node of graph.txt, is no gradient of weights."""
    nodes = {name: Node(name, "Linear()", 1e-3, 4e-3, parameter_bytes=8.0) for name in "abc"}
    graph = Graph(nodes, (("a", "b"), ("b", "c")))
    halves = {"backward_input_seconds": seconds(1e-3), "backward_weight_seconds": seconds(3e-3)}
    unknown = dict.fromkeys((*halves, "kept_bytes"))
    rounded = {"backward_weight_seconds": seconds(4.0004e-3)}
    profile = profile_of(graph, {"a": halves | {"kept_bytes": 7}, "b": unknown, "c": rounded})
    divided = profile.divide_backward(graph)
    a, b, c = divided.nodes.values()
    assert (a.backward_input_share, a.kept_bytes) == (pytest.approx(0.25), 7)
    assert b == graph.nodes["b"]
    assert c.backward_input_share == 0
    with_loss = graph.with_nodes([replace(nodes["a"], backward_seconds=6e-3)])
    of_inputs = profile.divide_backward(with_loss).nodes["a"].backward_input_seconds
    assert of_inputs == pytest.approx(3e-3)


def test_an_older_profile_says_nothing_of_halves(measured: Measured, tmp_path: Path) -> None:
    graph, profile = measured.graph, measured.profile
    older = json.loads(profile.model_dump_json())
    for node in older["nodes"]:
        for name in ("backward_input_seconds", "backward_weight_seconds", "kept_bytes"):
            assert node.pop(name) is not None
    (tmp_path / "profile.json").write_text(json.dumps(older))
    assert read_profile(tmp_path / "profile.json").divide_backward(graph) == graph
    assert profile.divide_backward(graph) != graph
