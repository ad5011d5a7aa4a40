"""The model that MODEL and its options name, and how they are written on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipedream.graph.errors import UserError

if TYPE_CHECKING:
    from pipedream.capture.sources.load import Loaded
    from pipedream.profiler.timing.local_operators import Shards

BATCH_SIZE = 32
"""Examples of a minibatch, where nobody says how many."""


def load_model(
    model: str,
    args: dict[str, Any],
    batch_size: int | None,
    inputs: tuple[str, ...],
    meta: bool,
    dtype: str | None = None,
    sequence: int | None = None,
) -> tuple[Loaded, dict[str, Any], int]:
    """Returns the model with its inputs, of `sequence` tokens if that is given, the arguments of
    its factory, and its batch size. Raises UserError.
    """
    from pipedream.capture.sources.load import in_dtype, load, load_config
    from pipedream.capture.sources.sequence import check_positions, for_sequence
    from pipedream.graph.errors import check_kind, read_text
    from pipedream.graph.run_config import read_config

    if not model.endswith((".yaml", ".yml")):
        if Path(model).is_file():
            check_kind(Path(model), read_text(Path(model)), "model")
        if ":" not in model:
            raise UserError(
                f"MODEL {model!r}: write torchvision:NAME, timm:NAME, transformers:NAME, "
                "package.module:factory, or the path of a run config, CONFIG.yaml"
            )
        size = batch_size or BATCH_SIZE
        if sequence is not None:
            if inputs:
                raise UserError("--sequence and --input both say what the inputs are: give one")
            args, inputs = for_sequence(model, args, sequence)
        loaded = load(model, args, size, inputs, meta)
        if sequence is not None:
            check_positions(loaded.model, model, sequence)
        return in_dtype(loaded, dtype or "float32"), args, size
    for name, values in (("--arg", args), ("--input", inputs), ("--sequence", sequence)):
        if values:
            raise UserError(f"{name} does not go with a run config: set it in {model}")
    path = Path(model)
    config = read_config(path)
    if dtype is not None:
        config = config.model_copy(update={"dtype": dtype})
    size = batch_size or config.batch_size
    return load_config(config, path.parent, size, meta), dict(config.model.args), size


def load_beside(parameters: Mapping[str, Any]) -> Loaded | None:
    """Returns the model beside whose passes to measure sums, if one is named."""
    import torch

    if parameters["model"] is None:
        return None
    torch.manual_seed(0)
    args = dict(map(parse_argument, parameters["arguments"]))
    size, inputs = parameters["batch_size"], parameters["inputs"]
    return load_model(parameters["model"], args, size, inputs, meta=False)[0]


def parse_argument(text: str) -> tuple[str, Any]:
    """Reads `hidden=[64, 64]` as a name and a YAML value."""
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"--arg {text}: write NAME=VALUE, such as --arg num_classes=10")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(
            f"--arg {text}: {value!r} is not a YAML value; write a list as [1, 2]"
        ) from error


def parse_sequences(text: str) -> tuple[int, ...]:
    """Reads `2048,4096`: lengths in ascending order. Raises UserError."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(
            f"--sequence {text}: give numbers of tokens, as 4096 or 2048,4096"
        ) from None
    if lengths[0] < 1:
        raise UserError(f"--sequence {text}: {lengths[0]} is no number of tokens: give 1 or more")
    return tuple(lengths)


def parse_shards(text: str) -> Shards:
    """Reads `2,4,8`, `none`, or the plan.json that is named. Raises UserError."""
    if text == "none":
        return ()
    if text.endswith(".json"):
        from pipedream.graph.plan import read_plan

        return read_plan(Path(text))
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"--shards {text}: give numbers of devices, as 2,4,8, a plan.json, or none"
        ) from None
    if min(counts) < 2:
        raise UserError(f"--shards {text}: {min(counts)} is no division: give 2 or more")
    return tuple(sorted(set(counts)))


def backend_asked(asked: str | None, own: str | None) -> str | None:
    """Returns torch.compile's backend, None for none. Raises UserError."""
    from pipedream.capture.compiled import check_backend
    from pipedream.graph.run_config import AUTO, backend_of

    backend = own if asked is None else backend_of(asked)
    if backend not in (None, AUTO):
        check_backend(backend, "compile" if asked is None else f"--compile {asked}")
    return backend
