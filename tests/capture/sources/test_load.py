from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipedream.capture.errors import user_code
from pipedream.capture.errors.user_code import call, import_torchvision, load_function
from pipedream.capture.export import capture
from pipedream.capture.sources.load import load, load_config, load_config_model, load_data
from pipedream.capture.sources.minibatch import example, minibatch
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import RunConfig

_numbers = itertools.count()

MODEL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

NOT_A_FUNCTION = 3

def plain(width=4):
    return nn.Linear(3, width).eval()

def partly_in_eval_mode():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].eval()
    return model

def with_inputs(batch_size):
    return nn.Bilinear(2, 3, 4), (torch.ones(batch_size, 2), torch.ones(batch_size, 3))

def with_one_input():
    return nn.Linear(3, 4), torch.ones(5, 3)

def raises(width=0):
    check(width)

def check(width):
    raise ValueError(f"width {width}\\nis too small")

def no_module():
    return {"a": 1}

def data(count=6):
    x = torch.arange(count * 3, dtype=torch.float64).view(count, 3)
    return TensorDataset(x, torch.arange(count)), None

def two_inputs():
    return [((torch.zeros(2), 7), 1.5)] * 4, [((torch.zeros(2), 7), 1.5)] * 2

def three_sets():
    return *data(), None

def loaders():
    return torch.utils.data.DataLoader(data()[0], 4), None

def no_sets():
    return 3, None

def empty():
    return [], None

def ragged():
    return [(torch.zeros(count), 0) for count in (1, 2, 3)], None

def no_pairs():
    return [torch.zeros(3)] * 4, None

class Broken:
    def __len__(self): return 9
    def __getitem__(self, index): raise OSError("disk gone")

def broken():
    return Broken(), None
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a module of the user's and gives its name, which no other test has used."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str = MODEL, folder: Path = tmp_path) -> str:
        name = f"users_module_{next(_numbers)}"
        (folder / f"{name}.py").write_text(text)
        return name

    monkeypatch.chdir(tmp_path)
    return write


def run_config(model: str, data: str, **more: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "format": "pipedream-run/1",
            "model": {"source": model},
            "data": {"source": data},
            "batch_size": 4,
            **more,
        }
    )


def message(source: str, args: dict[str, Any] | None = None, *inputs: str) -> str:
    with pytest.raises(UserError) as caught:
        load(source, args or {}, 2, inputs)
    assert "\n" not in caught.value.message.strip()
    return caught.value.message


def test_factory_from_the_current_directory_is_in_training_mode(user: Callable[..., str]) -> None:
    loaded = load(f"{user()}:plain", {"width": 7}, 2, ("3",))
    assert isinstance(loaded.model, nn.Linear)
    assert loaded.model.out_features == 7
    assert loaded.model.training
    assert [tuple(value.shape) for value in loaded.args] == [(2, 3)]


def test_what_a_factory_leaves_in_eval_mode_stays_so(user: Callable[..., str]) -> None:
    """Batch norm that was not to learn was put back into training mode."""
    name = user()
    loaded = load(f"{name}:partly_in_eval_mode", {}, 2, ("3",)).model
    trained = load_config_model(run_config(f"{name}:partly_in_eval_mode", f"{name}:data"), Path())
    for model in (loaded, trained):
        assert [module.training for module in model.modules()] == [True, True, False]
        x = torch.randn(4, 3)
        in_eval = capture(model, (x,), training=False).module.code
        assert [module.training for module in model.modules()] == [True, True, False]
        assert capture(model, (x,)).module.code == in_eval  # batch norm is all that differs


def test_factory_is_told_the_batch_size_and_may_give_its_inputs(user: Callable[..., str]) -> None:
    loaded = load(f"{user()}:with_inputs", {}, 5)
    assert [tuple(value.shape) for value in loaded.args] == [(5, 2), (5, 3)]
    loaded.model(*loaded.args)
    assert tuple(load(f"{user()}:with_one_input", {}, 5).args[0].shape) == (5, 3)


def test_inputs_described_by_the_user_override_the_factorys(user: Callable[..., str]) -> None:
    loaded = load(f"{user()}:with_inputs", {"batch_size": 9}, 5, ("2", "3"))
    assert [tuple(value.shape) for value in loaded.args] == [(5, 2), (5, 3)]


def test_a_dotted_name_and_a_class_are_factories_too() -> None:
    loaded = load("torch.nn:Linear", {"in_features": 3, "out_features": 2}, 4, ("3",))
    assert tuple(loaded.model(*loaded.args).shape) == (4, 2)


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("3x32x32", (2, 3, 32, 32), torch.float32),
        ("128:int64", (2, 128), torch.int64),
        ("7:float64", (2, 7), torch.float64),
        (":int64:10", (2,), torch.int64),
        ("4:bool", (2, 4), torch.bool),
    ],
)
def test_example_inputs(text: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = example(text, 2)
    assert (tuple(made.shape), made.dtype) == (shape, dtype)


def test_whole_numbers_are_below_their_bound_and_reach_it() -> None:
    assert set(example("5000:int64:7", 1).flatten().tolist()) == set(range(7))
    assert set(example("5000:int64", 1).flatten().tolist()) == {0, 1}


@pytest.mark.parametrize("text", ["", "3x", "ax3", "3:nn", "3:int64:x", "3:Tensor", "-3", "3 3"])
def test_inputs_that_mean_nothing(text: str) -> None:
    with pytest.raises(UserError, match="--input"):
        example(text, 2)


def test_mistakes_in_a_factory_are_one_line(user: Callable[..., str], tmp_path: Path) -> None:
    name = user()
    assert message("nosuch:f") == (
        "nosuch:f: there is no module nosuch in the current directory or on PYTHONPATH"
    )
    assert "no module os.nosuch" in message("os.nosuch:f")
    assert "has no 'plane'; did you mean 'plain'?" in message(f"{name}:plane")
    assert "is a int, not a function" in message(f"{name}:NOT_A_FUNCTION")
    assert "returns a dict, not a torch.nn.Module" in message(f"{name}:no_module")
    assert "--input 3x32x32" in message(f"{name}:plain")
    assert "unexpected keyword argument 'wide'" in message(f"{name}:plain", {"wide": 1})
    assert "its signature is plain(width)" in message(f"{name}:plain", {"wide": 1})
    assert "write package.module:name" in message(f"{name}:")
    assert message(f"{name}:raises", {"width": 3}) == (
        f"{name}:raises: {tmp_path}/{name}.py:26: ValueError: width 3 is too small"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def f(:\n", r"\.py:1: SyntaxError"),
        ("\nimport nosuch_either\n", r"\.py:2: ModuleNotFoundError: No module named 'nosuch_ei"),
        ("\n\n1 / 0\n", r"\.py:3: ZeroDivisionError"),
    ],
)
def test_a_module_that_does_not_import_is_blamed_by_line(
    user: Callable[..., str], text: str, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        load_function(f"{user(text)}:f")


@pytest.mark.parametrize("factory", ["def f(): pass", "def f():"])
def test_a_torchvision_for_another_torch(
    factory: str, user: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`from transformers import LlamaForCausalLM` failed so, in a module or in what makes a model;
    "torchvision:resnet18" did not.
    """
    declared: list[bool] = []
    monkeypatch.setattr(user_code, "import_torchvision", lambda: declared.append(True))
    monkeypatch.setattr(user_code, "declared", declared, raising=False)
    imports = """
from pipedream.capture.errors.user_code import declared
if not declared:
    try:
        raise RuntimeError("operator torchvision::nms does not exist")
    except RuntimeError as error:
        raise ModuleNotFoundError("Could not import module 'LlamaConfig'") from error
"""
    inside = factory.endswith(":")
    name = user(factory + imports.replace("\n", "\n    ") if inside else imports + factory)
    function = load_function(f"{name}:f")
    call(name, function, {})
    assert declared == [True]


def test_what_an_error_was_raised_from_is_told(user: Callable[..., str]) -> None:
    """Of transformers' lazy imports one read "Could not import module", without the cause."""
    name = user("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError('no') from e\n")
    with pytest.raises(UserError, match=r"OSError: no \(ZeroDivisionError: division by zero\)"):
        load_function(f"{name}:f")


def test_run_config_takes_the_first_minibatch_of_its_data(
    user: Callable[..., str], tmp_path: Path
) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    name = user(folder=folder)
    config = run_config(f"{name}:plain", f"{name}:data")
    loaded = load_config(config, folder)
    (images,) = loaded.args
    assert loaded.model.training
    assert images.dtype == torch.float32
    assert images.tolist() == torch.arange(12.0).view(4, 3).tolist()
    assert tuple(load_config(config, folder, 2).args[0].shape) == (2, 3)


def test_run_config_dtype_holds_for_model_and_inputs(user: Callable[..., str]) -> None:
    name = user()
    config = run_config(f"{name}:plain", f"{name}:data", dtype="float64")
    loaded = load_config(config, Path())
    assert loaded.model(*loaded.args).dtype == torch.float64
    assert next(load_config_model(config, Path()).parameters()).dtype == torch.float64


def test_several_inputs_and_a_target_that_the_model_takes(user: Callable[..., str]) -> None:
    name = user()
    config = run_config(f"{name}:plain", f"{name}:two_inputs", loss="output")
    vectors, numbers, target = load_config(config, Path()).args
    assert tuple(vectors.shape) == (4, 2)
    assert numbers.tolist() == [7] * 4
    assert (target.tolist(), target.dtype) == ([1.5] * 4, torch.float32)


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("three_sets", "must return (training set, held-out set or None), or a training set alone"),
        ("loaders", "a DataLoader: return the dataset; batch_size in the run config"),
        ("no_sets", "the training set, a int, lacks __len__ or __getitem__"),
        ("empty", "the training set is empty"),
        ("ragged", "3 examples do not fill a batch of 4"),
        ("no_pairs", "an example is a Tensor: give (input, ..., target), or a dict"),
        ("broken", "OSError: disk gone"),
        ("nosuch", "has no 'nosuch'"),
    ],
)
def test_mistakes_in_the_data_are_one_line(
    user: Callable[..., str], factory: str, told: str
) -> None:
    name = user()
    with pytest.raises(UserError) as caught:
        load_config(run_config(f"{name}:plain", f"{name}:{factory}"), Path())
    assert told in caught.value.message
    assert f"{name}:{factory}" in caught.value.message


def test_examples_of_different_shape_form_no_batch(user: Callable[..., str]) -> None:
    name = user()
    train, held_out = load_data(run_config(f"{name}:plain", f"{name}:ragged"), Path())
    assert held_out is None
    with pytest.raises(UserError, match="do not form a batch"):
        minibatch(train, [0, 1], torch.float32)


def test_torchvision_model_without_download(monkeypatch: pytest.MonkeyPatch) -> None:
    import_torchvision()

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("downloads weights")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    loaded = load("torchvision:fcn_resnet50", {"num_classes": 3}, 2, ("3x32x32",))
    assert loaded.model(*loaded.args)["out"].shape == (2, 3, 32, 32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "args", "shape"),
    [
        ("squeezenet1_0", {}, (2, 3, 224, 224)),
        ("inception_v3", {"init_weights": False}, (2, 3, 299, 299)),
        ("vit_b_16", {"image_size": 32}, (2, 3, 32, 32)),
        ("r3d_18", {}, (2, 3, 16, 112, 112)),
    ],
)
def test_torchvision_inputs(name: str, args: dict[str, Any], shape: tuple[int, ...]) -> None:
    assert tuple(load(f"torchvision:{name}", args, 2).args[0].shape) == shape


@pytest.mark.parametrize(
    ("name", "args", "shape"),
    [
        ("test_resnet", {}, (2, 3, 160, 160)),
        ("test_resnet.r160_in1k", {"in_chans": 1}, (2, 1, 160, 160)),
        ("test_vit", {"img_size": 32, "num_classes": 7}, (2, 3, 32, 32)),
        ("test_vit", {"img_size": [32, 64]}, (2, 3, 32, 64)),
    ],
)
def test_timm_inputs(name: str, args: dict[str, Any], shape: tuple[int, ...]) -> None:
    loaded = load(f"timm:{name}", args, 2)
    assert tuple(loaded.args[0].shape) == shape
    assert loaded.model.training
    assert tuple(loaded.model(*loaded.args).shape) == (2, args.get("num_classes", 1000))


SPEECH = {"d_model": 12, "encoder_layers": 1, "decoder_layers": 1}
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50},
    "bert": {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 50,
    },
    "llama": {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 50,
    },
    "t5": {"num_layers": 1, "d_model": 16, "d_ff": 16, "num_heads": 2, "vocab_size": 50},
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2", "GPT2LMHeadModel"),
        ("bert", "BertForMaskedLM"),
        ("llama", "LlamaForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
    ],
)
def test_transformers_give_logits_and_no_cache(name: str, kind: str) -> None:
    loaded = load(f"transformers:{name}", SMALL[name], 2)
    assert type(loaded.model).__name__ == kind
    assert loaded.model.training
    outputs = loaded.model(*loaded.args, **loaded.kwargs)
    assert tuple(outputs.logits.shape) == (2, 128, 50)
    assert set(outputs) - {"encoder_last_hidden_state"} == {"logits"}


def test_transformers_architecture_with_a_choice_of_heads() -> None:
    """Two classes of DeiT classify images: transformers looked for a choice among no names."""
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "image_size": 32}
    assert type(load("transformers:deit", small, 2).model).__name__ == "DeiTForImageClassification"


def test_transformers_sequence_length() -> None:
    short = {**SMALL["gpt2"], "n_positions": 9}
    assert tuple(load("transformers:gpt2", short, 2).args[0].shape) == (2, 9)
    (tokens,) = load("transformers:gpt2", SMALL["gpt2"], 2, ("30:int64",)).args
    assert tuple(tokens.shape) == (2, 30)
    assert 1 < tokens.max() < 50


def test_transformers_of_images() -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "image_size": 32}
    loaded = load("transformers:vit", small, 2)
    assert tuple(loaded.args[0].shape) == (2, 3, 32, 32)
    assert set(loaded.model(*loaded.args)) == {"logits"}


def test_mistakes_in_a_library_model_are_one_line() -> None:
    assert "did you mean 'resnet50'" in message("torchvision:resnet51")
    assert "did you mean 'resnet18'" in message("timm:resnet19")
    assert "unexpected keyword argument 'wide'" in message("timm:test_vit", {"wide": 1})
    assert "profile the backbone" in message("torchvision:fasterrcnn_resnet50_fpn")
    assert "did you mean 'bert'?" in message("transformers:bert-base-uncased")
    assert "has no 'n_layers'; did you mean 'n_layer'?" in message(
        "transformers:gpt2", {"n_layers": 2}
    )
    assert "must be divisible" in message("transformers:gpt2", {"n_head": 7})
    assert "unexpected keyword argument 'wide'" in message("torchvision:resnet18", {"wide": 1})
    assert "give their shape, such as --input 80x3000" in message("transformers:whisper", SPEECH)


def test_transformers_of_speech_take_a_second_input_for_the_decoder() -> None:
    loaded = load("transformers:whisper", SPEECH, 2, ("80x3000", "9:int64"))
    assert tuple(loaded.model(*loaded.args, **loaded.kwargs).logits.shape) == (2, 9, 51865)
