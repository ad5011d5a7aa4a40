"""What people divide by hand, found without a word about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from joint_models import trace
from torch import Tensor, nn

from pipedream.capture.programs.description import describe
from pipedream.graph.cluster import Link
from pipedream.graph.placements.operators import OperatorGraph, flops
from pipedream.graph.placements.placement import Mesh, parse_placements, show_placements
from pipedream.graph.placements.requests import Requests
from pipedream.optimizer.intra.costs import Accounting, StageProblem
from pipedream.optimizer.intra.solver.exact import solve
from pipedream.sharding.assignment import Assignment, LinkedMesh

FLOPS, MEMORY = 1e12, 1e11
"""Per second: of products, and bytes of all else."""


def best(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    mesh: Mesh,
    accounting: Accounting,
    kept: Mapping[str, float] | None = None,
) -> Assignment:
    return solved(stage_of(model, inputs, mesh, accounting, kept))


def stage_of(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    mesh: Mesh,
    accounting: Accounting,
    kept: Mapping[str, float] | None = None,
) -> StageProblem:
    graph = describe(trace(model, inputs, means=False).joint)
    links = (Link(bandwidth=1e10), Link(bandwidth=1e11))[-len(mesh) :]
    return StageProblem(
        *(graph, LinkedMesh(mesh, links), roofline(graph), frozenset(), accounting),
        kept=kept or {},
    )


def solved(stage: StageProblem) -> Assignment:
    choice = solve(stage.problem)
    assert choice.proven
    assert choice.labels is not None
    return stage.assignment(choice.labels)


def roofline(graph: OperatorGraph) -> dict[str, float]:
    """Seconds of products by their flops, of others by their bytes; views take none."""
    views = ("view", "t", "transpose", "expand", "unsqueeze", "slice", "split", "select")
    return {
        call.name: 0.0
        if call.operator.family.removeprefix("aten.") in views
        else max(
            flops(call.operator) / FLOPS,
            sum(type_.bytes for type_ in call.operator.inputs) / MEMORY,
        )
        for call in graph.calls
    }


def weights(assignment: Assignment) -> dict[str, str]:
    given = (each for each in assignment.graph.inputs if each.role == "parameter")
    return {
        each.name: show_placements(assignment.placed[each.value])
        for each in given
        if each.name.endswith("weight")
    }


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


def test_megatrons_feed_forward() -> None:
    """Columns, then rows: one sum forward and one backward."""
    found = best(feed_forward(), (torch.randn(8, 256),), (4,), Accounting(1, 1e-11))
    assert weights(found) == {"0.weight": "S(0)", "2.weight": "S(1)"}


def test_data_parallelism_at_a_large_batch() -> None:
    found = best(feed_forward(), (torch.randn(4096, 256),), (4,), Accounting(8))
    assert weights(found) == {"0.weight": "R", "2.weight": "R"}


def test_both_on_two_axes() -> None:
    """The slow axis divides the batch, the fast one the weights."""
    found = best(feed_forward(), (torch.randn(1024, 256),), (2, 4), Accounting(8, 2e-11))
    assert weights(found) == {"0.weight": "R,S(0)", "2.weight": "R,S(1)"}


class Attention(nn.Module):
    """Eight heads of queries; `fused`: one layer for all; `groups` of heads of keys and values."""

    def __init__(self, fused: bool = False, groups: int = 8) -> None:
        super().__init__()
        self.fused, self.groups = fused, groups
        if fused:
            self.qkv = nn.Linear(256, 768)
        else:
            self.q = nn.Linear(256, 256)
            self.k, self.v = (nn.Linear(256, 32 * groups) for _ in range(2))
        self.out = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, 32)).transpose(1, 2) for part in parts)
        if self.groups < 8:
            k, v = (each.repeat_interleave(8 // self.groups, 1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


@pytest.mark.parametrize(
    ("attention", "wanted"),
    [
        (Attention(fused=True), {"qkv.weight": "S(0, chunks=3)"}),
        (Attention(), {"q.weight": "S(0)", "k.weight": "S(0)", "v.weight": "S(0)"}),
        (Attention(groups=4), {"q.weight": "S(0)", "k.weight": "S(0)", "v.weight": "S(0)"}),
    ],
    ids=["fused", "separate", "grouped"],
)
def test_heads_of_attention(attention: nn.Module, wanted: Mapping[str, str]) -> None:
    """All of a head on one device, and the rows of the last layer with it."""
    inputs, parameters = (torch.randn(2, 64, 256),), {**wanted, "out.weight": "S(1)"}
    problem = stage_of(attention, inputs, (4,), Accounting(1, 1e-10))
    placed = {name: parse_placements(text) for name, text in parameters.items()}
    asked = replace(problem, requests=Requests(placed))
    assert solve(asked.problem).seconds == pytest.approx(solve(problem.problem).seconds, rel=1e-9)
    found = solved(asked)  # where a weight of few heads is placed otherwise costs the same
    assert weights(found) == parameters
    heads = {
        show_placements(placements)
        for call in found.graph.calls
        if "attention" in call.operator.target
        for placements in found.targets(call.name)[-3:]
    }
    assert "S(1)" in heads


class Words(nn.Module):
    """A large vocabulary on both ends, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(8192, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 8192, bias=False)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        logits = self.head(torch.relu(self.layer(self.words(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_a_large_vocabulary() -> None:
    """Each device has some of the words, and of the scores before the loss."""
    tokens = torch.randint(8192, (2, 8))
    found = best(Words(), (tokens, tokens), (4,), Accounting(1, 1e-10))
    placed = weights(found)
    assert placed["words.weight"] in ("S(0)", "S(1)")
    assert placed["head.weight"] == "S(0)"


class Pictures(nn.Module):
    """As VGG: convolutions with much work, layers with many weights, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
        )
        self.classifier = nn.Sequential(
            *(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()),
            nn.Linear(2048, 10),
        )

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(images).flatten(1)), target)


def test_convolutions_by_batch_and_a_classifier_by_features() -> None:
    """One weird trick (Krizhevsky, 2014)."""
    inputs = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    found = best(Pictures(), inputs, (4,), Accounting(1))
    placed = weights(found)
    assert {placed["features.0.weight"], placed["features.3.weight"]} == {"R"}
    assert all(placed[f"classifier.{k}.weight"] in ("S(0)", "S(1)") for k in (0, 2))
    convolutions = [call for call in found.graph.calls if "convolution" in call.operator.target]
    assert {show_placements(found.targets(call.name)[0]) for call in convolutions} == {"S(0)"}


class Layers(nn.Module):
    """Norms between layers, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(256, 1024) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(1024, 256) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(norm(x))))
        return x


def test_norms_by_sequence_where_time_asks_for_it() -> None:
    """A sum becomes its two halves, with the norm and the addition on a part between them."""
    found = best(Layers(), (torch.randn(1, 512, 256),), (4,), Accounting(1, 1e-10))
    placed = weights(found)
    assert {placed[f"ups.{k}.weight"] for k in (0, 1)} == {"S(0)"}
    assert {placed[f"downs.{k}.weight"] for k in (0, 1)} == {"S(1)"}
    norms = [call for call in found.graph.calls if call.operator.family == "aten.native_layer_norm"]
    assert {show_placements(found.targets(call.name)[0]) for call in norms} == {"S(1)"}
