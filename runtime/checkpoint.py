"""Checkpoints: parameters, buffers and optimizer state, keyed by their names in the model.

    checkpoints/epoch-0003/
        model-00001-of-00002.safetensors        one for each stage, by its first replica
        model.safetensors.index.json            which tensor is in which file, as Hugging Face's
        optimizer-00001-of-00002.safetensors    PARAMETER/STATE -> tensor
        optimizer.safetensors.index.json
        state.json

Stages appear in file names only: a run goes on under another plan, and the plain model loads them.
A checkpoint is written beside, as `epoch-0003.partial`, and renamed when it is whole.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pipedream.graph.artifact import read_artifact
from pipedream.graph.command import UserError

_PARTS = ("model", "optimizer")
_EPOCH = re.compile(r"epoch-(\d{4,})")


class State(BaseModel):
    """state.json; `details` is for people: what else the run wants to be known by."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["pipedream-checkpoint/1"] = "pipedream-checkpoint/1"
    epoch: int = Field(ge=0)
    details: dict[str, str | int | float] = {}


class _Metadata(BaseModel):
    total_size: int


class _Index(BaseModel):
    """A `.safetensors.index.json`; files are names of neighbours, never paths."""

    metadata: _Metadata
    weight_map: dict[str, str]


def write_shard(
    folder: Path,
    epoch: int,
    stage: int,
    stages: int,
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
) -> None:
    """Writes the part of one stage, to disk. `publish` follows when all have done so.

    `model` has parameters and buffers; the keys of `optimizer` are `PARAMETER/STATE`. Raises
    UserError if the disk refuses.
    """
    partial = _partial(folder, epoch)
    for part, tensors in zip(_PARTS, (model, optimizer), strict=True):
        path = partial / _shard(part, stage, stages)
        with _writing(path):
            partial.mkdir(parents=True, exist_ok=True)
            save_file(_separate(tensors), path, metadata={"format": "pt"})
            _to_disk(path)


def publish(
    folder: Path, epoch: int, stages: int, details: Mapping[str, str | int | float] | None = None
) -> Path:
    """Makes the checkpoint valid, all at once; its folder. Raises UserError if the disk refuses.

    To be called once, after all shards are written. Takes the place of an older checkpoint of the
    same epoch.
    """
    partial, final = _partial(folder, epoch), folder / f"epoch-{epoch:04}"
    wanted = {_shard(part, stage, stages) for part in _PARTS for stage in range(stages)}
    with _writing(final):
        for path in partial.iterdir():
            if path.name not in wanted:
                path.unlink()  # from a run that was stopped while it wrote
        for part in _PARTS:
            files = [partial / _shard(part, stage, stages) for stage in range(stages)]
            _write_text(partial / _index_name(part), _index(files).model_dump_json(indent=1))
        state = State(epoch=epoch, details=dict(details or {}))
        _write_text(partial / "state.json", state.model_dump_json(indent=1))
        _to_disk(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _to_disk(folder)
    return final


def latest(folder: Path) -> Path | None:
    """The checkpoint of the last epoch in `folder`, if there is any."""
    found = [path for path in folder.glob("epoch-*") if _EPOCH.fullmatch(path.name)]
    return max(found, key=lambda path: int(path.name.removeprefix("epoch-")), default=None)


def read_state(path: Path) -> State:
    """Raises UserError that names file and field."""
    return read_artifact(path / "state.json", State)


def load_model(path: Path, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors named in `like`, on the CPU; shapes and types have to be those of `like`.

    Raises UserError of one line that names the file, and the tensor that is missing or differs.
    """
    index = path / _index_name("model")
    files = _weight_map(path, "model")
    for name in like:
        if name not in files:
            raise UserError(f"{index}: there is no {name} in it; is it of another model?")
    loaded = _load(path, {name: files[name] for name in like})
    for name, tensor in loaded.items():
        found, wanted = _describe(tensor), _describe(like[name])
        if found != wanted:
            raise UserError(f"{path / files[name]}: {name} is {found}, in the model it is {wanted}")
    return loaded


def load_optimizer(path: Path, parameters: Iterable[str]) -> dict[str, torch.Tensor]:
    """What the optimizer knew of these parameters, as `PARAMETER/STATE`. Raises UserError."""
    names = set(parameters)
    files = _weight_map(path, "optimizer")
    return _load(path, {key: files[key] for key in files if key.rpartition("/")[0] in names})


def load_all(path: Path) -> dict[str, torch.Tensor]:
    """All parameters and buffers, for the plain model. Raises UserError."""
    return _load(path, _weight_map(path, "model"))


def _partial(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch:04}.partial"


def _shard(part: str, stage: int, stages: int) -> str:
    return f"{part}-{stage + 1:05}-of-{stages:05}.safetensors"


def _index_name(part: str) -> str:
    return f"{part}.safetensors.index.json"


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the CPU, none sharing memory with another, as safetensors wants them."""
    memory: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        if plain.untyped_storage().data_ptr() in memory:
            plain = plain.clone()
        memory.add(plain.untyped_storage().data_ptr())
        result[name] = plain
    return result


def _index(files: Iterable[Path]) -> _Index:
    """Where each tensor is; of those that several stages hold (tied weights) the first counts."""
    weight_map: dict[str, str] = {}
    size = 0
    for file in files:
        with _reading(file) as shard:
            for name in shard.keys():  # noqa: SIM118 (not a mapping)
                if name not in weight_map:
                    weight_map[name] = file.name
                    size += shard.get_tensor(name).nbytes
    return _Index(metadata=_Metadata(total_size=size), weight_map=weight_map)


def _weight_map(path: Path, part: str) -> dict[str, str]:
    index = path / _index_name(part)
    files = read_artifact(index, _Index).weight_map
    for file in files.values():
        if Path(file).name != file:
            raise UserError(f"{index}: {file!r} is not the name of a file beside it")
    return files


def _load(path: Path, files: Mapping[str, str]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(files.values())):
        with _reading(path / file) as shard:
            for name in (name for name, place in files.items() if place == file):
                tensors[name] = shard.get_tensor(name)
    return tensors


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read as safetensors: {reason}") from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be written: {reason}") from error


def _describe(tensor: torch.Tensor) -> str:
    sizes = " x ".join(map(str, tensor.shape)) or "one number"
    return f"{sizes} of {str(tensor.dtype).removeprefix('torch.')}"


def _write_text(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
    _to_disk(path)


def _to_disk(path: Path) -> None:
    """Waits until a file, or the entries of a folder, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
