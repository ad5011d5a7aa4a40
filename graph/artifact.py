"""Reading the house's JSON and YAML files into checked models: one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from pipedream.graph.command import UserError

Model = TypeVar("Model", bound=BaseModel)


def read_artifact(path: Path, model: type[Model]) -> Model:
    """Reads a .json or .yaml file as `model`. Raises UserError that names file and field."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"{path}: cannot be read: {reason}") from error
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = 1 if mark is None else mark.line + 1
        what = getattr(error, "problem", None) or "not YAML"
        raise UserError(f"{path}:{line}: {what}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}:1: expected named fields, found {type(data).__name__}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{path}: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return (f"{where}: " if where else "") + message + more
