"""`huggingface:NAME_OR_PATH`: columns of a dataset read by the package `datasets`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pipedream.capture.errors.user_code import close_matches
from pipedream.graph.errors import UserError

HELD_OUT = ("validation", "valid", "val", "test")
_READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def huggingface(name: str, directory: Path) -> Callable[..., tuple[Any, Any | None]]:
    """A data factory for a saved dataset, a file or folder of JSON lines, CSV or Parquet, or a
    dataset that `datasets` knows by `name`. Paths are relative to `directory`.
    """

    def huggingface_data(
        inputs: str | Sequence[str],
        target: str,
        train: str = "train",
        held_out: str | None = None,
        subset: str | None = None,
    ) -> tuple[Any, Any | None]:
        """Returns the columns `inputs` and `target` of the splits `train` and `held_out`.

        `held_out` defaults to the first split among validation, valid, val and test. `subset` is
        the configuration of the dataset.
        """
        splits = _load(name, directory, subset)
        columns = [inputs] if isinstance(inputs, str) else list(inputs)
        held_out = held_out or next((split for split in HELD_OUT if split in splits), None)
        chosen = [split for split in (train, held_out) if split is not None]
        sets = [_split(splits, split, columns, target, name) for split in chosen]
        return sets[0], sets[1] if len(sets) > 1 else None

    return huggingface_data


@dataclass(frozen=True)
class Columns:
    """Rows as examples (inputs, target): numbers and lists as tensors, images in 0 to 1."""

    rows: Any
    inputs: Sequence[str]
    target: str
    images: frozenset[str]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self.rows[index]
        values = tuple(
            row[name].float() / 255 if name in self.images else row[name] for name in self.inputs
        )
        return values, row[self.target]


def _load(name: str, directory: Path, subset: str | None) -> Any:
    """The splits by name."""
    datasets = _import()
    path = (directory / Path(name).expanduser()).resolve()
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        loaded = datasets.load_from_disk(str(path))
    elif path.is_file():
        if path.suffix not in _READERS:
            known = ", ".join(_READERS)
            raise UserError(f"huggingface:{name}: unknown type of file: give one of {known}")
        loaded = datasets.load_dataset(_READERS[path.suffix], data_files=str(path))
    else:
        loaded = datasets.load_dataset(str(path) if path.is_dir() else name, subset)
    return loaded if isinstance(loaded, dict) else {"train": loaded}


def _import() -> ModuleType:
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise UserError(
            "huggingface: the package datasets is not installed: pip install datasets"
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _split(splits: Any, split: str, inputs: Sequence[str], target: str, name: str) -> Columns:
    if split not in splits:
        raise UserError(
            f"huggingface:{name}: there is no split {split!r}, only {', '.join(splits)}"
        )
    rows = splits[split]
    for column in (*inputs, target):
        if column not in rows.column_names:
            raise UserError(
                f"huggingface:{name}: split {split!r} has no column {column!r}, only "
                f"{', '.join(rows.column_names)}" + close_matches(column, rows.column_names)
            )
    kinds = {column: type(rows.features[column]).__name__ for column in inputs}
    images = frozenset(column for column, kind in kinds.items() if kind == "Image")
    used = list(dict.fromkeys((*inputs, target)))
    return Columns(rows.with_format("torch", columns=used), inputs, target, images)
