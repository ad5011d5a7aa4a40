"""Loads the model, the example inputs and the data of a MODEL argument or a run config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from pipedream.capture.compute_settings import to_train
from pipedream.capture.errors.user_code import accepts, blaming, call, load_function
from pipedream.capture.fake_tensors import check_on_meta, on_meta_device, with_memory
from pipedream.capture.loss import Loss, load_loss
from pipedream.capture.sources.datasets import huggingface
from pipedream.capture.sources.image_folder import image_folder
from pipedream.capture.sources.minibatch import Dataset, examples, in_type, minibatch, model_inputs
from pipedream.capture.sources.named_examples import (
    NamedExamples,
    bind_inputs,
    input_names,
    named_examples,
)
from pipedream.capture.sources.streams import Stream, examples_of, is_stream, stream_of
from pipedream.capture.sources.transformers import (
    load_transformers,
    take_labels,
    transformers_inputs,
    without_cache,
)
from pipedream.capture.sources.vision import image_shape, load_timm, load_torchvision, timm_shape
from pipedream.graph.errors import UserError
from pipedream.graph.run_config import RunConfig


@dataclass(frozen=True)
class Loaded:
    """A model to train (`to_train`) with example inputs: call it as `model(*args, **kwargs)`.

    `autocast`: the lower precision to run it in. `loss`: of its output and the `target`, if known.
    `read`: reads a minibatch by the indices of its examples, out of `examples` in total. `compile`:
    torch.compile's backend that its run config has; `recorded`: whether passes are CUDA graphs.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    autocast: str | None = None
    loss: Loss | None = None
    target: Any = None
    read: Callable[[Sequence[int]], object] | None = None
    examples: int = 0
    compile: str | None = None
    recorded: bool = False


def load(
    source: str,
    args: Mapping[str, Any],
    batch_size: int,
    inputs: tuple[str, ...] = (),
    meta: bool = False,
) -> Loaded:
    """Creates the model that `source` names, with example inputs of `batch_size` examples.

    `source` is `torchvision:NAME`, `timm:NAME`, `transformers:NAME` or `package.module:factory`,
    called with `args`. A factory returns a module, optionally with its example inputs and a dict of
    keyword inputs; it gets `batch_size` if it has a parameter of that name. Modules that it has put
    in eval mode stay so, but a model wholly in eval mode is trained whole. `inputs` describe the
    inputs (see `minibatch.example`) and override the model's own. With `meta` the model has no
    memory: see `pipedream.capture.fake_tensors`. Raises UserError.
    """
    library, _, name = source.partition(":")
    model, own_inputs = _make(source, args, batch_size, None, meta)
    if library == "transformers":
        positional, named = transformers_inputs(model, source, batch_size, inputs)
        return Loaded(to_train(model), positional, named)
    if not inputs and library == "torchvision":
        inputs = (image_shape(name, args),)
    if not inputs and library == "timm":
        inputs = (timm_shape(model, args),)
    if not inputs and own_inputs is None:
        raise UserError(
            f"{source} returns no example inputs: describe them with --input 3x32x32, or "
            "--input 128:int64:50257 for integers, once per input, without the batch dimension"
        )
    if inputs or own_inputs is None:
        return Loaded(to_train(model), examples(inputs, batch_size))
    return Loaded(to_train(model), *own_inputs)


def in_dtype(loaded: Loaded, dtype: str) -> Loaded:
    """Returns the model and its inputs with floating values of a type, such as `bfloat16`."""
    if dtype == "float32":
        return loaded
    wanted = getattr(torch, dtype)
    loaded.model._apply(lambda tensor: in_type(tensor, wanted))  # type: ignore[no-untyped-call]
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda tensor: in_type(tensor, wanted), (loaded.args, loaded.kwargs)
    )
    return replace(loaded, args=args, kwargs=kwargs)


def load_config(
    config: RunConfig, directory: Path, batch_size: int | None = None, meta: bool = False
) -> Loaded:
    """Loads the model of a run config, with the first minibatch of its data as example inputs.

    With loss `output`, the target is the last input of the model, or its `labels` for transformers.
    Raises UserError.
    """
    size = batch_size or config.batch_size
    train, _ = load_data(config, directory)
    sized, names = config.model_copy(update={"batch_size": size}), input_names(train, config.loss)
    model = load_config_model(sized, directory, meta, names)
    if len(train) < size:
        raise UserError(
            f"{config.data.source}: {len(train)} examples do not fill a batch of {size}"
        )

    def read(indices: Sequence[int]) -> tuple[tuple[Tensor, ...], Any]:
        return minibatch(train, indices, getattr(torch, config.dtype), config.data.source)

    inputs, target = read(range(size))
    return Loaded(
        model,
        model_inputs(inputs, target, config.loss),
        {},
        config.autocast,
        loss=load_loss(config.loss, directory),
        target=target,
        # A stream cannot be read here and there, to learn how long that takes.
        read=None if stream_of(train) else read,
        examples=len(train),
        compile=config.compile_backend,
        recorded=config.records_passes,
    )


def load_config_model(
    config: RunConfig,
    directory: Path,
    meta: bool = False,
    names: Sequence[str] | None = None,
) -> nn.Module:
    """Creates the model of a run config in `directory`, in training mode and of its dtype; it takes
    its inputs by position, in the order of `names` (see `input_names`) if these are known.

    Seeds torch with the seed of the config, so the weights are the initial ones of a run. Raises
    UserError.
    """
    torch.manual_seed(config.seed)
    source = config.model.source
    model, _ = _make(source, config.model.args, config.batch_size, directory, meta)
    if names is not None:
        model = bind_inputs(model, names, source, config.data.source)
    elif config.loss == "output" and source.startswith("transformers:"):
        model = take_labels(model, source)
    dtype = getattr(torch, config.dtype)
    model._apply(lambda tensor: in_type(tensor, dtype))  # type: ignore[no-untyped-call]
    return to_train(model)


def load_data(config: RunConfig, directory: Path) -> tuple[Dataset, Dataset | None]:
    """Loads the training set of a run config, and its held-out set or None.

    Calls the factory with `data.args`; `torchvision-folder:` and `huggingface:` are built in. A
    factory may return the training set alone. Raises UserError.
    """
    source = config.data.source
    sets = call(source, _data_factory(source, directory), config.data.args)
    if isinstance(sets, tuple) and len(sets) != 2:
        raise UserError(
            f"{source} must return (training set, held-out set or None), or a training set alone,"
            f" not {len(sets)} things"
        )
    train, held_out = sets if isinstance(sets, tuple) else (sets, None)
    if is_stream(train):
        wanted = examples_of(train, config.data.examples, source)
        train = Stream(train, wanted, config.seed, source)
    if is_stream(held_out):
        with blaming(source):
            held_out = list(held_out)
    _check_set(source, "training", train)
    if held_out is not None:
        _check_set(source, "held-out", held_out)
    train = named_examples(train, config.data, directory)
    if isinstance(train, NamedExamples) and held_out is not None:
        held_out = replace(train, dataset=held_out)
    return train, held_out


def _check_set(source: str, which: str, dataset: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise UserError(
            f"{source}: the {which} set is a DataLoader: return the dataset; batch_size in the"
            " run config makes the minibatches"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        kind = type(dataset).__name__
        raise UserError(f"{source}: the {which} set, a {kind}, lacks __len__ or __getitem__")
    with blaming(source):
        length = len(dataset)
    if length == 0:
        raise UserError(f"{source}: the {which} set is empty")


def _data_factory(source: str, directory: Path) -> Callable[..., Any]:
    library, _, name = source.partition(":")
    if library == "torchvision-folder":
        return image_folder(directory / Path(name).expanduser())
    if library == "huggingface":
        return huggingface(name, directory)
    return load_function(source, directory)


def _make(
    source: str, args: Mapping[str, Any], batch_size: int, directory: Path | None, meta: bool
) -> tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]] | None]:
    """The model, and its example inputs if its factory returns some."""
    if meta:
        with on_meta_device(source):
            model, inputs = _make(source, args, batch_size, directory, meta=False)
        check_on_meta(source, model)
        return model, with_memory(inputs)
    library, _, name = source.partition(":")
    if library == "torchvision":
        return load_torchvision(name, args), None
    if library == "timm":
        return load_timm(name, args), None
    if library == "transformers":
        return load_transformers(name, args), None
    factory = load_function(source, directory)
    size = {"batch_size": batch_size} if accepts(factory, "batch_size") else {}
    result = call(source, factory, {**size, **args})
    model, *given = result if isinstance(result, tuple) and len(result) in (2, 3) else (result,)
    if not isinstance(model, nn.Module):
        raise UserError(f"{source} returns a {type(model).__name__}, not a torch.nn.Module")
    without_cache(model)
    if not given or given[0] is None:
        return model, None
    positional = given[0] if isinstance(given[0], tuple) else (given[0],)
    named = given[1] if len(given) == 2 else {}
    if not isinstance(named, dict):
        raise UserError(f"{source} returns a {type(named).__name__} third, not a dict of inputs")
    return model, (positional, named)
