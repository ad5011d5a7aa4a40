"""Data as people have it: dicts, several inputs, one dataset, a collate function of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipedream.capture.errors.user_code import import_torchvision
from pipedream.capture.export import capture
from pipedream.capture.sources.load import load_config, load_config_model, load_data
from pipedream.capture.sources.named_examples import NamedExamples, input_names
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import DataFactory, Factory, RunConfig

HERE = f"{__name__}:"


class Two(nn.Module):
    """Its second parameter is not the second part of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(
        self, input_ids: Tensor, past: Any = None, mask: Tensor | None = None, labels: Any = None
    ) -> Any:
        embedded = self.embedding(input_ids)
        if past is not None:
            raise AssertionError("bound by position")
        if mask is not None:
            embedded = embedded * mask.unsqueeze(-1)
        output = self.head(embedded.sum(1))
        return output if labels is None else nn.functional.cross_entropy(output, labels)


class Rows:
    """So many examples, each a dict."""

    def __init__(self, target: str = "labels", count: int = 8, **more: Any) -> None:
        self.target, self.count, self.more = target, count, more

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.count:
            raise IndexError(index)
        mask = torch.tensor([1.0, 1.0, float(index % 2)])
        row = {"mask": mask, "input_ids": torch.tensor([index, 1, 2]) % 9, self.target: index % 3}
        return row | self.more


def rows(**args: Any) -> Rows:
    return Rows(**args)


def both(**args: Any) -> tuple[Rows, Rows]:
    return Rows(**args), Rows(count=4, **args)


def triples() -> list[tuple[Tensor, Tensor, int]]:
    return [(torch.full((3,), float(i)), torch.full((2,), float(-i)), i % 3) for i in range(8)]


def columns() -> TensorDataset:
    return TensorDataset(torch.zeros(8, 3), torch.ones(8, 2), torch.arange(8) % 3)


def padded(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in examples], batch_first=True)
    return {"input_ids": ids, "labels": torch.tensor([row["labels"] for row in examples])}


def stacked(examples: list[dict[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    parts = ("input_ids", "mask", "labels")
    a, b, c = (torch.stack([torch.as_tensor(row[name]) for row in examples]) for name in parts)
    return a, b, c


def config(data: str, loss: str = "cross_entropy", model: str = "Two", **fields: Any) -> RunConfig:
    return RunConfig(
        format="pipedream-run/1",
        model=Factory(source=HERE + model),
        data=DataFactory(source=HERE + data, **fields),
        loss=loss,
        batch_size=4,
    )


def test_the_parts_of_a_dict_go_to_the_parameters_of_these_names() -> None:
    """A mask landed in whatever parameter came second."""
    run = config("both")
    train, held_out = load_data(run, Path())
    assert isinstance(train, NamedExamples)
    assert isinstance(held_out, NamedExamples)
    assert input_names(train, run.loss) == ("mask", "input_ids")
    loaded = load_config(run, Path())
    plain, found = load_config_model(run, Path()), loaded.model(*loaded.args)
    assert isinstance(plain, Two)
    mask, ids = loaded.args
    torch.testing.assert_close(found, plain(ids, mask=mask))
    assert list(dict(loaded.model.named_parameters())) == list(dict(plain.named_parameters()))


def test_a_model_with_a_loss_of_its_own_gets_the_target_by_its_name_too() -> None:
    run = config("rows", loss="output")
    assert input_names(load_data(run, Path())[0], "output") == ("mask", "input_ids", "labels")
    loaded = load_config(run, Path())
    assert loaded.model(*loaded.args).shape == ()


@pytest.mark.parametrize("name", ["labels", "label", "target", "targets", "y"])
def test_a_target_is_known_by_its_usual_names(name: str) -> None:
    train, _ = load_data(config("rows", args={"target": name}), Path())
    assert isinstance(train, NamedExamples)
    assert (train.inputs, train.target) == (("mask", "input_ids"), name)


def test_the_run_config_names_inputs_and_target() -> None:
    run = config("rows", args={"target": "kind", "idx": 7}, inputs=("input_ids",), target="kind")
    loaded = load_config(run, Path())
    (ids,) = loaded.args
    assert ids.tolist() == [[index, 1, 2] for index in range(4)]


def test_text_among_the_parts_stays_where_it_is() -> None:
    loaded = load_config(config("rows", args={"text": "a sentence"}), Path())
    assert [tuple(value.shape) for value in loaded.args] == [(4, 3), (4, 3)]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"args": {"idx": 7}}, "the examples have 'idx', which .*:Two does not take: list"),
        ({"inputs": ("input_id",)}, "no 'input_id', only mask, input_ids, labels; did you mean"),
        ({"target": "kind"}, "no 'kind', only mask, input_ids, labels"),
        ({"collate": HERE + "nosuch"}, "has no 'nosuch'"),
        ({"collate": HERE + "rows"}, "rows"),
    ],
)
def test_mistakes_are_told_in_one_line(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        load_config(config("rows", **fields), Path())


def test_names_for_examples_that_have_none_are_refused() -> None:
    with pytest.raises(UserError, match=r"target: y: the examples of .* have no names"):
        load_data(config("triples", target="y"), Path())


@pytest.mark.parametrize("data", ["triples", "columns"])
def test_of_several_parts_without_names_the_last_is_the_target(data: str) -> None:
    """An example was refused unless it was a pair."""
    a, b = load_config(config(data), Path()).args
    assert (tuple(a.shape), tuple(b.shape)) == ((4, 3), (4, 2))


def test_a_function_of_the_user_makes_the_minibatch() -> None:
    (ids,) = load_config(config("rows", collate=HERE + "padded"), Path()).args
    assert tuple(ids.shape) == (4, 3)
    ids, mask = load_config(config("rows", collate=HERE + "stacked"), Path()).args
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.float32)


def texts() -> Any:
    ids = [torch.randint(0, 50, (6,)) for _ in range(8)]
    return [{"input_ids": x, "attention_mask": torch.ones(6).long(), "labels": x} for x in ids]


def own_gpt2() -> nn.Module:
    import_torchvision()  # a broken one would keep transformers from being imported
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 50, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["own", "transformers:llama"])
def test_a_language_model_gets_its_mask_and_labels_without_a_class_of_the_users(model: str) -> None:
    """The mask landed in past_key_values, and the cache could not be captured."""
    run = config("texts", loss="output")
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 50, "intermediate_size": 8}
    factory = (
        Factory(source=model, args=sizes) if model != "own" else Factory(source=HERE + "own_gpt2")
    )
    loaded = load_config(run.model_copy(update={"model": factory}), Path())
    captured = capture(loaded.model, loaded.args)
    assert len(captured.inputs) == 3
    ids, mask, labels = loaded.args
    assert torch.equal(ids, labels)
    assert mask.shape == ids.shape


@pytest.mark.slow
def test_a_class_of_transformers_names_its_architecture() -> None:
    with pytest.raises(UserError, match="is a class of the architecture llama: write llama"):
        load_config_model(
            config("rows").model_copy(
                update={"model": Factory(source="transformers:LlamaForCausalLM")}
            ),
            Path(),
        )
