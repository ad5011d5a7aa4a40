"""Sequence lengths: the inputs and the positions that `transformers:NAME` needs for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pipedream.capture.sources.transformers import make_config
from pipedream.graph.errors import UserError

_POSITIONS = ("max_position_embeddings", "max_seq_len")
"""What configurations call the number of positions; GPT-2 has the first as a synonym."""


def for_sequence(
    source: str, args: Mapping[str, Any], length: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the arguments of the model, with as many positions as sequences of `length` tokens
    need, and its inputs (see `--input`). Raises UserError if the model has none of that length.
    """
    library, _, name = source.partition(":")
    option = f"--sequence {length}"
    if library in ("timm", "torchvision"):
        raise UserError(_no_tokens(source, length))
    if library != "transformers":
        raise UserError(
            f"{option}: is for transformers:NAME, and how long the inputs of {source} are is not"
            f" known: give --input {length}:int64:BOUND, or the arguments of its factory with --arg"
        )
    for key in (*_POSITIONS, "n_positions"):
        given = args.get(key)
        if isinstance(given, int) and given < length:
            raise UserError(
                f"{option}: --arg {key}={given} allows no more than {given} tokens: raise it, or"
                " leave it out"
            )
    config = make_config(name, source, args)
    if getattr(config.get_text_config(), "vocab_size", None) is None:
        raise UserError(_no_tokens(source, length))
    for key in _POSITIONS:
        positions = _positions(config, key)
        if positions is not None and positions < length:
            args = {**args, key: length}
    both = getattr(config, "is_encoder_decoder", False)
    return dict(args), (f"{length}:int64",) * (2 if both else 1)


def check_positions(model: nn.Module, source: str, length: int) -> None:
    """Raises UserError if the model has a table of positions with too few rows: without memory
    nothing else would tell; or if it reads no tokens.
    """
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise UserError(_no_tokens(source, length))
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if not isinstance(module, nn.Embedding) or not ("position" in name or name == "wpe"):
            continue
        if name.startswith("relative") or "token_type" in name:
            continue
        first = 0 if module.padding_idx is None else module.padding_idx + 1
        if module.num_embeddings < first + length:
            raise UserError(
                f"--sequence {length}: {path} of {source} has {module.num_embeddings} rows,"
                f" {first} of them for padding: give --arg max_position_embeddings={first + length}"
            )


def _positions(config: Any, key: str) -> int | None:
    try:
        found = getattr(config, key, None)
    except NotImplementedError:  # XLNet says so that it has no limit
        return None
    return found if isinstance(found, int) else None


def _no_tokens(source: str, length: int) -> str:
    return (
        f"--sequence {length}: {source} reads no sequence of tokens: leave it out, or describe its"
        " inputs with --input"
    )
