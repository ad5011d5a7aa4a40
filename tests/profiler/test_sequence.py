"""`pd-profile --sequence`: how many tokens an example has."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipedream.capture.sources.load import load
from pipedream.capture.sources.sequence import check_positions, for_sequence
from pipedream.graph.errors import UserError
from pipedream.graph.profile import read_profile
from pipedream.profiler.cli import main

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
ROBERTA = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(word) for word in words])
    return result.exit_code, result.output.strip().splitlines()[-1]


def test_positions_are_raised_where_the_model_has_too_few() -> None:
    args, inputs = for_sequence("transformers:gpt2", {"n_layer": 1}, 2048)
    assert (args, inputs) == ({"n_layer": 1, "max_position_embeddings": 2048}, ("2048:int64",))
    args, _ = for_sequence("transformers:gpt2", {"n_layer": 1}, 512)
    assert args == {"n_layer": 1}
    _, both = for_sequence("transformers:t5", {}, 64)
    assert both == ("64:int64", "64:int64")


def test_the_model_runs_at_that_length() -> None:
    small = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 50}
    args, inputs = for_sequence("transformers:gpt2", small, 1500)
    loaded = load("transformers:gpt2", args, 2, inputs)
    assert loaded.args[0].shape == (2, 1500)
    assert loaded.model(*loaded.args).logits.shape == (2, 1500, 50)


REFUSED = {
    "torchvision:resnet18": ({}, "reads no sequence of tokens"),
    "transformers:vit": ({}, "reads no sequence of tokens"),
    "small_models:mlp": ({}, "is for transformers:NAME"),
    "transformers:gpt2": ({"n_positions": 64}, "--arg n_positions=64 allows no more than 64"),
}


@pytest.mark.parametrize("source", REFUSED)
def test_what_has_no_such_length_is_refused(source: str) -> None:
    args, told = REFUSED[source]
    with pytest.raises(UserError, match=told):
        for_sequence(source, args, 128)


def test_a_table_of_positions_that_is_too_short_is_told() -> None:
    """RoBERTa counts positions from beyond its padding: 512 rows are too few for 512 tokens."""
    args, inputs = for_sequence("transformers:roberta", ROBERTA, 512)
    loaded = load("transformers:roberta", args, 1, inputs, meta=True)
    with pytest.raises(UserError, match="give --arg max_position_embeddings=514"):
        check_positions(loaded.model, "transformers:roberta", 512)
    enough = {**ROBERTA, "max_position_embeddings": 514}
    loaded = load("transformers:roberta", enough, 1, inputs, meta=True)
    check_positions(loaded.model, "transformers:roberta", 512)
    speech = load("transformers:whisper", {}, 1, ("80x3000",), meta=True)
    with pytest.raises(UserError, match="reads no sequence of tokens"):
        check_positions(speech.model, "transformers:whisper", 512)


@pytest.mark.slow
@pytest.mark.thorough
def test_several_lengths_have_folders_and_profiles_that_say_so(tmp_path: Path) -> None:
    arguments = [f"--arg={name}={value}" for name, value in LLAMA.items()]
    command = ["transformers:llama", *arguments, "--for", "h100", "--dtype", "bfloat16"]
    sizes = ("--sequence", "32,16", "--batch-sizes", "1,2", "--shards", "none")
    asked = [*command, *sizes, "-o", tmp_path]
    code, last = run(*asked)
    assert (code, last.startswith(f"Next: pd-optimize {tmp_path} --sequence 16")) == (0, True)
    for length in (16, 32):
        for size in (1, 2):
            folder = tmp_path / f"sequence-{length}" / f"batch-{size}"
            profile = read_profile(folder / "profile.json")
            assert (profile.sequence, profile.tokens) == (length, length)
            assert profile.nodes[0].outputs[0].shape == (size, length)


WRONG = {
    "no number": (("--sequence", "long"), "--sequence long: give numbers of tokens"),
    "none": (("--sequence", "0"), "--sequence 0: 0 is no number of tokens"),
    "with --input": (
        ("--sequence", "16", "--input", "16:int64:100"),
        "--sequence and --input both say what the inputs are",
    ),
    "fp8 here": (("--dtype", "fp8"), "--dtype fp8 is a what-if"),
    "fp8 on an A100": (
        ("--dtype", "fp8", "--for", "a100"),
        "NVIDIA A100 SXM 80GB has no peak for float8_e4m3fn in its device file",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_mistakes_are_one_line(tmp_path: Path, wrong: str) -> None:
    words, told = WRONG[wrong]
    result = CliRunner().invoke(main, ["transformers:gpt2", *words, "-o", str(tmp_path / "o")])
    assert result.exit_code == 2
    assert told in result.output.strip().splitlines()[-1]


def test_a_run_config_has_its_own_length(tmp_path: Path) -> None:
    code, last = run("config.yaml", "--sequence", "16", "-o", tmp_path / "o")
    assert code == 2
    assert "--sequence does not go with a run config" in last
