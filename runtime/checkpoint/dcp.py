"""Folders of torch.distributed.checkpoint (DCP): a trained model as one, and a run begun with one.

They are written for `torch.distributed.checkpoint.load` of

    {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}

and read with whatever stands before the names of the parameters, such as `app.model.`.

The index of such a folder, `.metadata`, is a pickle. The unpickler here makes the few plain objects
of an index and refuses all else; entries that are pickles themselves, such as learning rates, are
not read at all. So nothing in the folder is executed.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from pipedream.graph.errors import UserError
from pipedream.runtime.checkpoint.files import torch_reads

_INDEX = ".metadata"

_USUAL = ("", "model.", "app.model.")
"""What stands before the names of parameters. If several fit, the first of these is taken."""

_NUMBERED = r"(?:^|\.)state\.\d+\.[^.]+$"
"""Of `optimizer.state_dict()`: as `optim.state.0.exp_avg`."""


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of the state_dict, by name; modules may keep other things there."""
    return {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}


def write_folder(path: Path, model: nn.Module, optimizer: Mapping[str, Any]) -> None:
    """Writes the model's weights, and the state of an optimizer as `optimizer_state` returns it."""
    state = {"model": state_tensors(model), "optim": dict(optimizer)}
    save(state, storage_writer=FileSystemWriter(str(path)), no_dist=True)


def optimizer_state(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Returns the state of a fresh optimizer of the model by names of parameters, with `tensors`,
    `PARAMETER/STATE`, in it. Other parameters have zeros, as in any loop.
    """
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        state["state"].setdefault(name, {})[part] = tensor
    return state


class Folder:
    """A folder to read. Raises UserError if it is none, or is broken."""

    def __init__(self, path: Path) -> None:
        self.path, self.reader = path, _Reader(path)
        if not (path / _INDEX).is_file():
            raise UserError(
                f"{path}: this is no folder of torch.distributed.checkpoint: it has no {_INDEX}"
            )
        with torch_reads(path / _INDEX):
            entries = self.reader.read_metadata().state_dict_metadata.items()
            self.tensors = {
                key: (torch.Size(known.size), known.properties.dtype)
                for key, known in entries
                if isinstance(known, metadata.TensorStorageMetadata)
            }

    def load_model(self, into: Mapping[str, Tensor]) -> None:
        """Fills the tensors, each by its name; types are converted, shapes have to be the same.

        Raises UserError that names the tensor that is missing or differs.
        """
        place = self._place(list(into))
        for name, tensor in into.items():
            shape, _ = self.tensors[place + name]
            if shape != tensor.shape:
                raise UserError(
                    f"{self.path}: {place}{name} has the shape {list(shape)}, and in the model it"
                    f" is {list(tensor.shape)}"
                )
        self._load({place + name: tensor for name, tensor in into.items()})

    def load_optimizer(self, parameters: Iterable[str]) -> dict[str, Tensor]:
        """Returns what an optimizer knew of these parameters, as `PARAMETER/STATE`: nothing if the
        folder has no optimizer. Raises UserError if it has several, or is one without names.
        """
        names, optimizers = set(parameters), dict[str, dict[str, str]]()
        for key in self.tensors:
            for before in re.finditer(r"(?:^|\.)state\.", key):
                name, _, part = key[before.end() :].rpartition(".")
                if name in names:
                    known = optimizers.setdefault(key[: before.end()], {})
                    known[f"{name}/{part}"] = key
        if len(optimizers) > 1:
            raise self._unfit(f"it has several optimizers, {', '.join(sorted(optimizers))}")
        if not optimizers and any(map(re.compile(_NUMBERED).search, self.tensors)):
            raise self._unfit(
                "its optimizer has numbers and no names of parameters: save what"
                " torch.distributed.checkpoint.state_dict.get_optimizer_state_dict returns"
            )
        keys = next(iter(optimizers.values()), {})
        with torch_reads(self.path):
            sizes = {part: self.tensors[key] for part, key in keys.items()}
            tensors = {part: torch.empty(shape, dtype=t) for part, (shape, t) in sizes.items()}
        self._load({key: tensors[part] for part, key in keys.items()})
        return tensors

    def _unfit(self, problem: str) -> UserError:
        return UserError(
            f"{self.path}: {problem}; or add --no-init-optimizer, to begin with the weights alone"
        )

    def _place(self, names: Sequence[str]) -> str:
        """Returns what stands before these names in the folder."""
        first = next(iter(names), "")
        ends = (key.removesuffix(first) for key in self.tensors if key.endswith(first))
        places = sorted(end for end in ends if not end or end.endswith("."))
        whole = [place for place in places if all(place + name in self.tensors for name in names)]
        usual = [place for place in _USUAL if place in whole]
        if len(whole) > 1 and not usual:
            raise UserError(
                f"{self.path}: it has several such models, {', '.join(whole)}: save the one to"
                " begin with by itself"
            )
        if not whole:
            place = next(iter(places), "")
            missing = next(name for name in names if place + name not in self.tensors)
            raise UserError(f"{self.path}: there is no {missing} in it; is it of another model?")
        return (usual or whole)[0]

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        # Of entries that are no tensors torch would unpickle whatever they are.
        assert tensors.keys() <= self.tensors.keys()
        if tensors:
            with torch_reads(self.path):
                load(dict(tensors), storage_reader=self.reader, no_dist=True)


class _Reader(FileSystemReader):
    """Reads the index by `_IndexUnpickler`: torch's own reader unpickles whatever is in it."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        with Path(self.path, _INDEX).open("rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, metadata.Metadata):
            raise pickle.UnpicklingError(f"it has a {type(index).__name__}, not an index")
        for stored in index.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path:
                path = stored.relative_path
                raise pickle.UnpicklingError(f"{path!r} is not the name of a file beside it")
        index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return index


_KINDS = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    _StorageInfo,
)


class _IndexUnpickler(pickle._Unpickler):
    """Makes the objects of an index. Python's own code: the one in C takes gigabytes for a memo
    number in a broken file.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Returns what the pickle may name. Raises UnpicklingError for all else."""
        for kind in (*_KINDS, metadata._MEM_FORMAT_ENCODING, torch.Size):
            if (kind.__module__, kind.__name__) == (module, name):
                return kind
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return {"torch.strided": torch.strided}.__getitem__
        if module.partition(".")[0] == "pathlib":  # where the folder was
            return PurePosixPath
        raise pickle.UnpicklingError(f"it names {module}.{name}, which an index does not need")

    def load_build(self) -> None:
        """Only such objects have attributes to set: no class, which would be changed for all."""
        if not isinstance(self.stack[-2], _KINDS):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it changes what is no object of an index")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build
