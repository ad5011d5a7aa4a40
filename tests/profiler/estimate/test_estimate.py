"""Estimated profiles beside measured ones of the same models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from estimates import MODELS, estimated

from pipedream.capture.captured import flatten_inputs
from pipedream.capture.export import capture
from pipedream.capture.sources.load import load
from pipedream.graph.model import read_graph
from pipedream.graph.placements.operators import read_operators
from pipedream.graph.profile import read_profile
from pipedream.profiler.cli import main as pd_profile
from pipedream.profiler.memory import footprints
from pipedream.profiler.timing.backward_split import backward_splits
from pipedream.profiler.timing.stopping_rule import StoppingRule

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("source", MODELS)
def test_nodes_save_what_measured_ones_save(source: str) -> None:
    """Byte by byte, masks of dropout among them; and of the graph of a real capture."""
    args, inputs = MODELS[source]
    real = load(source, args, 2, inputs)
    whole = capture(real.model, real.args, real.kwargs)
    expected = footprints(whole, flatten_inputs(real.args, real.kwargs), CPU)
    found = estimated(source)
    assert found.graph.fingerprint == whole.graph.fingerprint
    saved = {node.id: node.saved_bytes for node in found.profile.nodes}
    assert saved == {name: each.saved for name, each in expected.items()}


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("source", ["torchvision:resnet18", "timm:vit_tiny_patch16_224"])
def test_what_gradients_of_weights_keep_is_about_what_measured_ones_keep(source: str) -> None:
    """Small gradients that come with those of inputs, of norms, are left out."""
    args, inputs = MODELS[source]
    real = load(source, args, 2, inputs)
    whole = capture(real.model, real.args, real.kwargs)
    taken = flatten_inputs(real.args, real.kwargs)
    expected = backward_splits(whole, taken, StoppingRule(1, 1), CPU)
    nodes = estimated(source).profile.nodes
    kept = sum(node.kept_bytes or 0 for node in nodes)
    assert kept == pytest.approx(sum(each.kept_bytes for each in expected.values()), rel=0.06)
    for node in nodes:
        weights, backward = node.backward_weight_seconds, node.backward_seconds
        assert weights is not None
        part = weights.median / backward.median if backward.median else 0.0
        if not node.parameters:
            assert part == 0
        if node.op == "Linear" and node.inputs:
            assert 0.2 < part < 0.8, node


@pytest.mark.slow
def test_operators_add_up_to_their_nodes() -> None:
    found = estimated("transformers:llama", "h100")
    assert found.operators is not None
    passes = sum(found.operators.seconds.values())
    totals = found.profile.totals
    assert passes == pytest.approx(totals.forward_seconds + totals.backward_seconds)
    assert found.profile.flops is not None
    assert found.profile.flops > 0


@pytest.mark.slow
def test_a_profile_for_a_device_that_is_not_at_hand(tmp_path: Path) -> None:
    """The command, from nothing to files that say what they are."""
    args, _ = MODELS["transformers:llama"]
    arguments = [f"--arg={name}={value}" for name, value in args.items()]
    command = ["transformers:llama", *arguments, "--input", "16:int64:100", "--for", "h100"]
    more = ["--dtype", "bfloat16", "--batch-size", "2", "-o", str(tmp_path)]
    result = CliRunner().invoke(pd_profile, [*command, *more])
    assert result.exit_code == 0, result.output
    assert "Estimated, not measured, for NVIDIA H100" in result.output
    profile, graph = read_profile(tmp_path / "profile.json"), read_graph(tmp_path / "graph.txt")
    assert profile.is_of(graph)
    assert profile.estimated is not None
    assert (profile.machine.device, profile.tokens) == ("cuda", 16)
    types = {each.dtype for node in profile.nodes for each in node.outputs}
    assert "bfloat16" in types
    assert read_operators(tmp_path / "operators.json").fingerprint == graph.fingerprint


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--for", "h101"], ": name h100"),
        (["--for", "h100", "--device", "cpu"], "--device is for measuring"),
        (["--for", "h100", "--compile", "stage"], "--compile is for measuring"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(more: list[str], told: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(pd_profile, ["torchvision:resnet18", *more, "-o", str(tmp_path)])
    assert result.exit_code == 2
    assert told in result.output
    assert result.output.count("\n") == 1
