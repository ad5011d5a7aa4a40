"""Checkpoints: parameters, buffers and optimizer state, keyed by their names in the model.

    checkpoints/latest -> epoch-0003            the newest one
    checkpoints/epoch-0003/                     epoch-0003-000120: and 120 minibatches of the next
        model-00001-of-00002.safetensors        one for each stage, by its first replica
        model.safetensors.index.json            which tensor is in which file, as Hugging Face's
        optimizer/                              the same again, with PARAMETER/STATE -> tensor
        state.json

Stages appear in file names only: a run goes on under another plan, and the plain model loads them.
A checkpoint is written beside, as `epoch-0003.partial`, and renamed when it is whole.

torch.distributed.checkpoint writes and reads the tensors, in its safetensors format. Its own format
has an index that is a pickle; here each stage saves by itself, and the index is JSON. Nothing is
ever unpickled.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from pipedream.graph.errors import UserError, read_artifact, worded
from pipedream.graph.placements.regions import Region, blocks, whole
from pipedream.runtime.optim.stepping import Progress
from pipedream.runtime.run.training_segment import Position

_INDEX = "model.safetensors.index.json"
_LATEST = "latest"

_COMPLEX = "@complex"
"""Of the name of a complex tensor [...], which is in a file as pairs of numbers [..., 2]."""

# Said of every save and load by one process for itself, which is what happens here.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


class State(BaseModel):
    """state.json: the position of the data, and the training state other than tensors.

    `epoch` whole epochs and `minibatch` minibatches of the next one are behind it. `training` is
    what the run needs to go on beside the tensors: such as the state of a learning rate scheduler.
    `details` are identifying details of the run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["pipedream-checkpoint/1"] = "pipedream-checkpoint/1"
    epoch: int = Field(ge=0)
    minibatch: int = Field(default=0, ge=0)
    training: dict[str, Any] = {}
    details: dict[str, str | int | float] = {}

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.minibatch)


class _IndexMetadata(BaseModel):
    total_size: int


class _Index(BaseModel):
    """A `.safetensors.index.json`; files are names of neighbours, never paths."""

    metadata: _IndexMetadata
    weight_map: dict[str, str]


class _StageWriter(HuggingFaceStorageWriter):
    """Writes the file of one stage. The index is of all stages: `publish` writes it."""

    def __init__(self, folder: Path, names: Iterable[str], stage: int, stages: int) -> None:
        # The greatest number says how many files there are; nothing has an empty name.
        files = {**dict.fromkeys(names, stage + 1), "": stages}
        super().__init__(str(folder), fqn_to_index_mapping=files)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass


def write_stage(
    folder: Path,
    position: Position,
    stage: int,
    stages: int,
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
) -> None:
    """Writes the part of one stage, to disk. `publish` follows when all have done so.

    `model` has parameters and buffers; the keys of `optimizer` are `PARAMETER/STATE`. All tensors
    are as `copied` gives them. Raises UserError if the disk refuses.
    """
    partial = _partial(folder, position)
    both = _as_pairs(model), _as_pairs(optimizer)
    for part, tensors in zip(_parts(partial), both, strict=True):
        path = part / _file(stage, stages)
        with writing(path):
            part.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # from a run that was stopped while it wrote
            writer = _StageWriter(part, tensors, stage, stages)
            save(tensors, storage_writer=writer, no_dist=True)


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the CPU, which share memory with nothing: training may go on meanwhile."""
    return {
        name: torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format).copy_(
            tensor.detach()
        )
        for name, tensor in tensors.items()
    }


def publish(
    folder: Path,
    position: Position,
    stages: int,
    training: Mapping[str, Any] | None = None,
    details: Mapping[str, str | int | float] | None = None,
) -> Path:
    """Makes the checkpoint valid, all at once; its folder. Raises UserError if the disk refuses.

    To be called once, after all stages have written. Takes the place of an older checkpoint of the
    same position. What was written of earlier positions, and never published, goes.
    """
    partial, final = _partial(folder, position), folder / str(position)
    wanted = {_file(stage, stages) for stage in range(stages)}
    state = State(
        epoch=position.epoch,
        minibatch=position.minibatch,
        training=dict(training or {}),
        details=dict(details or {}),
    )
    with writing(final):
        for part in _parts(partial):
            for path in part.glob("*.safetensors"):
                if path.name not in wanted:
                    path.unlink()  # from a run that was stopped while it wrote
            files = sorted(part.glob("*.safetensors"))
            _write_text(part / _INDEX, _index(files).model_dump_json(indent=1))
        _write_text(partial / "state.json", state.model_dump_json(indent=1))
        for part in _parts(partial):
            _to_disk(part)
        _discard(final)
        partial.rename(final)
        _point(folder / _LATEST, final.name)
        _to_disk(folder)
    for path in folder.glob("epoch-*.partial"):  # from a run that was stopped while it wrote
        before = Position.of(path.name.removesuffix(".partial"))
        if before is not None and before < position:
            shutil.rmtree(path, ignore_errors=True)
    return final


def keep_newest(folder: Path, count: int) -> None:
    """Deletes all checkpoints but the newest `count`. Raises UserError if the disk refuses."""
    for path in _whole(folder)[:-count]:
        with writing(path):
            _discard(path)
    for path in folder.glob("epoch-*.old"):  # from a run that was stopped while it deleted
        shutil.rmtree(path, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Deletes the checkpoints that runs which were killed left half written or half deleted."""
    for path in (*folder.glob("epoch-*.partial"), *folder.glob("epoch-*.old")):
        shutil.rmtree(path, ignore_errors=True)
    (folder / f"{_LATEST}.partial").unlink(missing_ok=True)


def latest(folder: Path) -> Path | None:
    """Returns the checkpoint in `folder` that is furthest on, if there is any."""
    return next(reversed(_whole(folder)), None)


def read_state(path: Path) -> State:
    """Raises UserError that names file and field."""
    return read_artifact(path / "state.json", State)


def progress_of(path: Path, saved: State) -> Progress:
    """Returns what the checkpoint at `path` knows of rates and scales. Raises UserError."""
    try:
        return Progress.model_validate(saved.training)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        file = path / "state.json"
        raise UserError(f"{file}: training.{field}: {worded(problem)}") from error


RegionOf: TypeAlias = Callable[[str, tuple[int, ...]], Region | None]
"""Of the name of a parameter or buffer, and the shape of a tensor that goes with it: the elements
that are wanted of it; None for all."""


def _all(_name: str, _shape: tuple[int, ...]) -> None:
    return None


def load_model(
    path: Path,
    into: Mapping[str, torch.Tensor],
    region_of: RegionOf = _all,
    whole_shape: Callable[[str], tuple[int, ...]] | None = None,
) -> None:
    """Fills the tensors, each by its name; shapes and types have to be the same. Tensors that are
    parts are read by slices: `whole_shape` has the shapes of the whole ones.

    Raises UserError of one line that names the file, and the tensor that is missing or differs.
    """
    part, rest = _CheckpointPart(path), _as_pairs(into)
    for name, tensor in list(rest.items()):
        own, shape = name.removesuffix(_COMPLEX), tuple(tensor.shape)
        if whole_shape is not None:
            shape = (*whole_shape(own), *shape[into[own].dim() :])
        part.check(name, shape, tensor.dtype)
        if (region := region_of(own, shape)) is not None:
            del rest[name]
            part.load_region(name, region, tensor)
    part.load(rest)


StateOf: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor | None]
"""Of the name of a parameter, and a tensor that an optimizer keeps of it: what is wanted of that,
None for nothing.
"""


def _as_it_is(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def load_optimizer(
    path: Path,
    parameters: Iterable[str],
    region_of: RegionOf = _all,
    state_of: StateOf = _as_it_is,
) -> dict[str, torch.Tensor]:
    """Returns what the optimizer knew of these parameters, as `PARAMETER/STATE`, in parts where
    they are, and of those what `state_of` gives. Raises UserError.
    """
    part, names = _CheckpointPart(path / "optimizer"), set(parameters)
    known: dict[str, torch.Tensor] = {}
    for key in part.files:  # one by one: all that are whole may need too much memory
        name = key.rpartition("/")[0]
        if name in names:
            tensor = part.read(key, region_of(name, tuple(part.stored[key].size)))
            ((own_key, tensor),) = _from_pairs({key: tensor}).items()
            if (wanted := state_of(name, tensor)) is not None:
                known[own_key] = wanted
    return known


def load_all(path: Path) -> dict[str, torch.Tensor]:
    """Returns all parameters and buffers, for the plain model. Raises UserError."""
    part = _CheckpointPart(path)
    return _from_pairs(part.loaded(part.files))


def load_plain(model: nn.Module, path: Path) -> None:
    """Loads a checkpoint into the plain model; tied parameters have their first name."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in load_all(path).items():
            if name not in own:
                raise UserError(f"{path}: {name} is not in this model")
            own[name].copy_(tensor)


class _CheckpointPart:
    """The tensors of the model, or those of the optimizer: `files` has the file of each.

    Raises UserError where a file of the index is missing or broken.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.index = path, path / _INDEX
        self.files = read_artifact(self.index, _Index).weight_map
        names: dict[str, set[str]] = {}
        for file in set(self.files.values()):
            if Path(file).name != file:
                raise UserError(f"{self.index}: {file!r} is not the name of a file beside it")
            with _reading(path / file) as tensors:
                names[file] = set(tensors.keys())
        for name, file in self.files.items():
            if name not in names[file]:
                raise UserError(f"{path / file}: there is no {name} in it")
        self.reader = HuggingFaceStorageReader(str(path))
        with torch_reads(path):
            entries = self.reader.read_metadata().state_dict_metadata.items()
        self.stored = {
            name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)
        }
        for name, stored in self.stored.items():
            if any(any(chunk.offsets) for chunk in stored.chunks):
                raise UserError(f"{path}: {name} is a part of a tensor, and a stage saves it whole")

    def check(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        if name not in self.files:
            raise UserError(f"{self.index}: there is no {name} in it; is it of another model?")
        description = _describe(self.stored[name].size, self.stored[name].properties.dtype)
        wanted = _describe(shape, dtype)
        if description != wanted:
            file = self.path / self.files[name]
            raise UserError(f"{file}: {name} is {description}, in the model it is {wanted}")

    def load(self, into: Mapping[str, torch.Tensor]) -> None:
        if into:
            with torch_reads(self.path):
                load(dict(into), storage_reader=self.reader, no_dist=True)

    def load_region(self, name: str, region: Region, into: torch.Tensor) -> None:
        """Fills `into` with these elements of a tensor, of which no others are read."""
        everything = whole(tuple(self.stored[name].size))
        with _reading(self.path / self.files[name]) as tensors:
            stored = tensors.get_slice(name)
            for there, here in blocks(region, everything):
                into[here] = stored[there]

    def read(self, name: str, region: Region | None) -> torch.Tensor:
        """Returns these elements of a tensor; None for all."""
        if region is None:
            with _reading(self.path / self.files[name]) as tensors, torch_reads(self.path):
                tensor: torch.Tensor = tensors.get_tensor(name)
            return tensor
        into = torch.empty(region.shape, dtype=self.stored[name].properties.dtype)
        self.load_region(name, region, into)
        return into

    def loaded(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        tensors = {
            name: torch.empty(self.stored[name].size, dtype=self.stored[name].properties.dtype)
            for name in names
        }
        self.load(tensors)
        return tensors


def _whole(folder: Path) -> list[Path]:
    """Returns the whole checkpoints, the newest last. A run writes them in this order."""
    positions = ((Position.of(path.name), path) for path in folder.glob("epoch-*"))
    return [path for _, path in sorted((at, path) for at, path in positions if at is not None)]


def _partial(folder: Path, position: Position) -> Path:
    return folder / f"{position}.partial"


def _parts(path: Path) -> tuple[Path, Path]:
    return path, path / "optimizer"


def _file(stage: int, stages: int) -> str:
    """Returns the name as torch.distributed.checkpoint and Hugging Face have it."""
    return f"model-{stage + 1:05}-of-{stages:05}.safetensors"


def _index(files: Iterable[Path]) -> _Index:
    """Says where each tensor is; of those that several stages hold (tied) the first counts."""
    weight_map: dict[str, str] = {}
    size = 0
    for file in files:
        with _reading(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if name not in weight_map:
                    weight_map[name] = file.name
                    size += tensors.get_tensor(name).nbytes
    return _Index(metadata=_IndexMetadata(total_size=size), weight_map=weight_map)


def _point(link: Path, name: str) -> None:
    """Points the link at its sibling `name`, atomically."""
    fresh = link.with_name(f"{link.name}.partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(name)
    fresh.replace(link)


def _discard(path: Path) -> None:
    """Deletes a checkpoint. At no moment is a part of it taken for a whole one."""
    if path.exists():
        doomed = path.with_name(f"{path.name}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def _as_pairs(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors by the names that they have in files; pairs are in the same memory."""
    return {
        f"{name}{_COMPLEX}" if tensor.is_complex() else name: (
            torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
        )
        for name, tensor in tensors.items()
    }


def _from_pairs(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.removesuffix(_COMPLEX): (
            torch.view_as_complex(tensor) if name.endswith(_COMPLEX) else tensor
        )
        for name, tensor in tensors.items()
    }


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read as safetensors: {reason}") from error


@contextmanager
def torch_reads(path: Path) -> Iterator[None]:
    """Turns whatever torch.distributed.checkpoint raises over a broken folder into UserError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of the version of a broken pickle
            yield
    except (Exception, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause = next(wrapped[0] for wrapped in error.failures.values())
        first, *_ = str(cause).splitlines() or [""]
        if first.startswith("Weights only load failed"):  # it goes on to advise against safety
            first = "a tensor in it is broken"
        reason = getattr(cause, "strerror", None) or f"{type(cause).__name__}: {first}"
        raise UserError(f"{path}: torch cannot read this as a checkpoint: {reason}") from error


@contextmanager
def writing(what: Path | str) -> Iterator[None]:
    """Turns errors of writing `what` into UserError."""
    try:
        yield
    except CheckpointException as error:
        (failure,) = (wrapped[0] for wrapped in error.failures.values())
        if not isinstance(failure, OSError):
            raise
        raise UserError(f"{what}: cannot be written: {failure.strerror}") from error
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{what}: cannot be written: {reason}") from error


def _describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    sizes = " x ".join(map(str, shape)) or "one number"
    return f"{sizes} of {str(dtype).removeprefix('torch.')}"


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
