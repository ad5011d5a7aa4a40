"""Data that needs no factory: folders of images, and what the package datasets reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from pipedream.capture.sources import datasets as from_huggingface
from pipedream.capture.sources.load import load_config, load_data
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import DataFactory, Factory, RunConfig


def config(source: str, **args: Any) -> RunConfig:
    return RunConfig(
        format="pipedream-run/1",
        model=Factory(source="torch.nn:Identity"),
        data=DataFactory(source=source, args=args),
        batch_size=2,
    )


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes: red and blue, 12 x 8 pixels; one of each held out."""
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 3), ("val", 1)):
        for name, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            folder = tmp_path / "pictures" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                image.new("RGB", (12, 8), colour).save(folder / f"{number}.png")
    return tmp_path


def test_a_folder_of_images(pictures: Path) -> None:
    train, held_out = load_data(
        config("torchvision-folder:pictures", size=6, crop=4, normalise=False), pictures
    )
    assert held_out is not None
    assert (len(train), len(held_out)) == (6, 2)
    red, number = train[5]
    assert (tuple(red.shape), number) == ((3, 4, 4), 1)
    torch.testing.assert_close(red[:, 0, 0], torch.tensor([1.0, 0.0, 0.0]))
    (batch,) = load_config(config("torchvision-folder:pictures", size=6, crop=4), pictures).args
    assert batch.shape == (2, 3, 4, 4)
    torch.testing.assert_close(batch[0, 2, 0, 0].item(), (1 - 0.406) / 0.225, rtol=1e-5, atol=0)


def test_only_training_images_are_augmented(pictures: Path) -> None:
    source = config("torchvision-folder:pictures", crop=5, augment=True)
    train, held_out = load_data(source, pictures)
    assert "Random" in repr(train.transform)
    assert "Random" not in repr(held_out.transform)
    assert train[0][0].shape == held_out[0][0].shape == (3, 5, 5)


def test_mistakes_with_folders_are_one_line(pictures: Path) -> None:
    with pytest.raises(UserError, match="there is no folder train/ in it"):
        load_data(config("torchvision-folder:pictures/train"), pictures)
    with pytest.raises(UserError, match="its signature is torchvision_folder"):
        load_data(config("torchvision-folder:pictures", colour=True), pictures)
    (pictures / "pictures/val/red").rename(pictures / "pictures/val/green")
    with pytest.raises(UserError, match="have different classes: green is in one of them only"):
        load_data(config("torchvision-folder:pictures"), pictures)


ROWS = [{"a": [1.0, 2.0], "b": number, "label": number % 3} for number in range(6)]


def check(train: Any, held_out: Any) -> None:
    assert (len(train), len(held_out)) == (6, 2)
    (a, b), label = train[4]
    torch.testing.assert_close(a, torch.tensor([1.0, 2.0]))
    assert (b.item(), label.item(), label.dtype) == (4, 1, torch.int64)


COLUMNS: dict[str, Any] = {"inputs": ["a", "b"], "target": "label"}


def test_a_dataset_saved_on_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {
        "train": datasets.Dataset.from_list(ROWS),
        "test": datasets.Dataset.from_list(ROWS[:2]),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    check(*load_data(config("huggingface:saved", **COLUMNS), tmp_path))
    a, b = load_config(config("huggingface:saved", **COLUMNS), tmp_path).args
    assert (a.shape, b.tolist()) == ((2, 2), [0, 1])
    parts["train"].save_to_disk(tmp_path / "one")
    train, held_out = load_data(config("huggingface:one", inputs="a", target="b"), tmp_path)
    assert (len(train), held_out) == (6, None)


def test_files_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "rows"
    folder.mkdir()
    for split, rows in (("train", ROWS), ("validation", ROWS[:2])):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    check(*load_data(config("huggingface:rows", **COLUMNS), tmp_path))
    train, held_out = load_data(config("huggingface:rows/train.jsonl", **COLUMNS), tmp_path)
    assert (len(train), held_out) == (6, None)


def test_images_are_from_0_to_1(tmp_path: Path) -> None:
    datasets, image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [image.new("RGB", (4, 5), (255, 0, 51))], "label": [1]}
    datasets.Dataset.from_dict(rows, features).save_to_disk(tmp_path / "images")
    train, _ = load_data(config("huggingface:images", inputs="image", target="label"), tmp_path)
    ((found,), _) = train[0]
    assert found.shape == (3, 5, 4)
    torch.testing.assert_close(found[:, 0, 0], torch.tensor([1.0, 0.0, 0.2]))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"target": "labels"}, "no column 'labels', only a, b, label; did you mean 'label'"),
        ({"train": "all"}, "there is no split 'all', only train"),
        ({"held_out": "dev"}, "there is no split 'dev', only train"),
        ({"column": "a"}, "its signature is huggingface_data"),
    ],
)
def test_mistakes_with_columns_are_one_line(tmp_path: Path, args: Any, says: str) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=says):
        load_data(config("huggingface:saved", **{**COLUMNS, **args}), tmp_path)


def test_without_datasets_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(from_huggingface.importlib, "import_module", missing)
    with pytest.raises(UserError, match="pip install datasets"):
        load_data(config("huggingface:saved", **COLUMNS), tmp_path)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter([])


def stream() -> tuple[Stream, None]:
    return Stream(), None


def test_a_stream_of_unknown_length_is_refused() -> None:
    with pytest.raises(UserError, match=r"a stream of unknown length: write examples: N"):
        load_data(config(f"{__name__}:stream"), Path())
