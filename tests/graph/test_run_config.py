"""Run configs: what they default to, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipedream.graph.errors import UserError
from pipedream.graph.run_config import read_config

MINIMAL = """\
format: pipedream-run/1
model: {source: "mine:model"}
data: {source: "mine:data", args: {size: 3}}
batch_size: 8
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, MINIMAL))
    assert config.model.args == {}
    assert config.data.args == {"size": 3}
    assert (config.loss, config.optimizer.name) == ("cross_entropy", "SGD")
    assert (config.epochs, config.microbatches, config.seed, config.dtype) == (1, 4, 0, "float32")


@pytest.mark.parametrize(
    "source", ["torchvision-folder:my pictures/cats & dogs", "huggingface:../data.jsonl"]
)
def test_data_may_come_from_any_path(tmp_path: Path, source: str) -> None:
    config = read_config(write(tmp_path, MINIMAL.replace("mine:data", source)))
    assert config.data.source == source


def test_a_learning_rate_is_a_number(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, MINIMAL + "optimizer: {name: Adam, args: {lr: 1e-3}}\n"))
    assert config.optimizer.args == {"lr": 0.001}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "pipedream-run/1",
            "pipedream-run/7",
            "format: 'pipedream-run/7' is not one of the choices: write 'pipedream-run/1'",
        ),
        ("format: pipedream-run/1\n", "", "format: is missing"),
        ("batch_size: 8", "batch_size: 0", "batch_size: 0 is too small: give 1 or more"),
        ("batch_size: 8", "batch_size: few", "batch_size: 'few' is not a whole number"),
        ("batch_size: 8", "", "batch_size: is missing"),
        ("batch_size: 8", "batchsize: 8", r"batchsize: .* did you mean batch_size\?"),
        ("batch_size: 8", "batch_size: 8\nepochs: 0", "epochs: "),
        ("batch_size: 8", "batch_size: 8\nmicrobatches: 0", "microbatches: "),
        (
            "batch_size: 8",
            "batch_size: 8\ndtype: float8",
            "dtype: .* 'float32', 'float64' or 'bfloat16'",
        ),
        ("batch_size: 8", "batch_size: 8\nepoch: 3", r"epoch: .* did you mean epochs\?"),
        ("batch_size: 8", "batch_size: on", "batch_size: true is not a whole number"),
        ("batch_size: 8", "batch_size: 8\nbatch_size: 9", ":5: batch_size is given twice"),
        ("mine:model", "mine", "model.source: write package.module:factory or"),
        ("mine:model", "os:system('x')", "model.source: write package.module:factory or"),
        ("mine:data", "", "data.source: write package.module:factory, torchvision-folder:PATH or"),
        ("mine:data", "huggingface:", "data.source: write package.module:factory, "),
        ("batch_size: 8", "batch_size: 8\nsampler: {source: mine}", "sampler.source: write "),
        ("args: {size: 3}", "args: 3", "data.args: 3 is not a set of named fields"),
    ],
)
def test_a_wrong_config_names_file_and_field(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in MINIMAL
    path = write(tmp_path, MINIMAL.replace(old, new))
    with pytest.raises(UserError, match=says) as caught:
        read_config(path)
    assert caught.value.format_message().startswith(f"{path}:")
