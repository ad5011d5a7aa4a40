"""What --export gives for a model of transformers is a folder for `from_pretrained`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
import transformers
from plans import cut, make_plan
from safetensors.torch import load_file
from training import run_jobs, weights

from pipedream.capture.export import capture
from pipedream.capture.sources.load import load_config_model
from pipedream.graph.plan import Plan
from pipedream.graph.run_config import DataFactory, Factory, RunConfig
from pipedream.runtime.checkpoint import files as checkpoint
from pipedream.runtime.checkpoint.export import export
from pipedream.runtime.run.job import Job
from pipedream.runtime.run.training_segment import Position

SUPPORT = Path(small_models.__file__).parent

ENCODER = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("AutoModelForCausalLM", {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 64}),
    "bert": ("AutoModelForMaskedLM", ENCODER | {"intermediate_size": 16}),
    "t5": (
        "AutoModelForSeq2SeqLM",
        {"d_model": 8, "d_ff": 16, "d_kv": 4, "num_heads": 2, "num_layers": 1, "vocab_size": 64},
    ),
    "llama": ("AutoModelForCausalLM", ENCODER | {"intermediate_size": 16}),
}


def job(architecture: str, folder: Path) -> Job:
    _, args = ARCHITECTURES[architecture]
    config = RunConfig(
        format="pipedream-run/1",
        model=Factory(source=f"transformers:{architecture}", args=args),
        data=DataFactory(source="small_models:tokens", args={"examples": 8}),
        loss="small_models:mean_square",
        batch_size=4,
    )
    return Job(planned(small_models.Chain(), torch.randn(4, 6)), config, SUPPORT, folder)


def planned(model: torch.nn.Module, x: torch.Tensor) -> Plan:
    graph = capture(model, (x,)).graph
    return make_plan(graph, cut(graph, 2), (1, 1), "flush")


def loaded(architecture: str, folder: Path) -> torch.nn.Module:
    auto, _ = ARCHITECTURES[architecture]
    model, told = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    assert not any(told.values())
    assert isinstance(model, torch.nn.Module)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_weights_are_there(architecture: str, tmp_path: Path) -> None:
    """Tied ones, too. The cache, which is off while a model trains, is on again."""
    asked = job(architecture, tmp_path / "run")
    model = load_config_model(asked.config, asked.directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    tensors = checkpoint.copied(dict(model.named_parameters()) | dict(model.named_buffers()))
    checkpoint.write_stage(asked.checkpoints, Position(1), 0, 1, tensors, {})
    export(asked, checkpoint.publish(asked.checkpoints, Position(1), 1), tmp_path / "model")
    again = loaded(architecture, tmp_path / "model")
    expected = model.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name])
    assert type(again).__name__ == type(model).__name__
    assert json.loads((tmp_path / "model/config.json").read_text())["use_cache"] is True


@pytest.mark.thorough
@pytest.mark.slow
def test_a_pipeline_s_tied_weights_are_there(tmp_path: Path) -> None:
    first = job("gpt2", tmp_path / "run")
    model = load_config_model(first.config, first.directory)
    plan = planned(model, torch.zeros(4, 12, dtype=torch.int64))
    asked = replace(first, plan=plan, schedule="flush", export=tmp_path / "model")
    run_jobs([asked, replace(asked, resume=True, epochs=2, export=tmp_path / "one.safetensors")])
    trained, state = weights(asked), load_file(tmp_path / "one.safetensors")
    again = loaded("gpt2", tmp_path / "model")
    assert torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
    assert again.state_dict().keys() == state.keys()
    assert trained.keys() <= state.keys()
    for name, tensor in trained.items():
        assert torch.equal(state[name], tensor)
    assert again.get_parameter("lm_head.weight") is again.get_parameter("transformer.wte.weight")
    before = checkpoint.load_all(asked.checkpoints / "epoch-0001")
    for name, tensor in before.items():
        assert torch.equal(again.state_dict()[name], tensor)
