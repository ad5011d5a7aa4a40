"""One line for what a user has to mend, and the files that are read and checked for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, TypeVar, get_args

import click
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

Model = TypeVar("Model", bound=BaseModel)

_TEXT = "tag:yaml.org,2002:str"


class UserError(click.ClickException):
    """Something the user can mend: one line, exit code 2, no traceback.

    The message names the file and line or the option, what is wrong and what to do.
    """

    exit_code = 2


class ArtifactModel(BaseModel):
    """The base of everything that JSON and YAML files hold: frozen, and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class _Yaml(yaml.SafeLoader):
    """YAML as people write it: `1e-3` is a number (YAML 1.1 calls it a string, 1.2 does not), and
    a field that is given twice is a mistake (the parser would take the last).
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == _TEXT and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is there twice: leave one of them out",
                    problem_mark=key.start_mark,
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises UserError `FILE: cannot be read: why`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read: not a text file in UTF-8") from error


def read_artifact(path: Path, model: type[Model]) -> Model:
    """Reads a .json or .yaml file as `model`. Raises UserError that names file and field."""
    text = read_text(path)
    try:
        data = _parse_json(path, text) if path.suffix == ".json" else _parse_yaml(path, text)
    except RecursionError as error:
        raise UserError(f"{path}:1: nested too deeply") from error
    if not isinstance(data, dict):
        found = "nothing" if data is None else f"a {type(data).__name__}"
        raise UserError(f"{path}:1: expected named fields, found {found}")
    if "format" in model.model_fields and "format" not in data:
        raise UserError(f"{path}:1: format: is missing")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{path}{_line(text, error)}: {_first(error, model)}") from error


def _parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise UserError(f"{path}:1: not JSON: {error}") from error


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        return yaml.load(text, _Yaml)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = 1 if mark is None else mark.line + 1
        what = getattr(error, "problem", None) or "not YAML"
        raise UserError(f"{path}:{line}: {what}") from error
    except ValueError as error:  # a date that no calendar has
        raise UserError(f"{path}:1: not YAML: {error}") from error


def _line(text: str, error: ValidationError) -> str:
    """`:LINE` of the field that is wrong, or of those it is missing among. JSON is YAML, too.

    Nothing where the fault is in no field, or the text (a JSON one) does not read as YAML.
    """
    where = error.errors()[0]["loc"]
    try:
        node = yaml.compose(text, _Yaml)
    except (yaml.YAMLError, RecursionError):
        node = None
    if node is None or not where:
        return ""
    for part in where:
        if isinstance(node, yaml.MappingNode):
            inside = {key.value: value for key, value in node.value}
        elif isinstance(node, yaml.SequenceNode):
            inside = dict(enumerate(node.value))
        else:
            break
        node = inside.get(part, node)
    return f":{node.start_mark.line + 1}"


def _first(error: ValidationError, model: type[BaseModel]) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    hint = _instead(first["loc"], model) if first["type"] == "extra_forbidden" else ""
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return (f"{where}: " if where else "") + worded(first) + hint + more


def _instead(where: Sequence[str | int], model: type[BaseModel]) -> str:
    """The fields that there are, where the last name of `where` is none; the likely one first."""
    *outer, name = where
    for part in outer:
        if isinstance(part, str) and part in model.model_fields:
            found = _models(model.model_fields[part].annotation)
            if len(found) != 1:
                return ""
            (model,) = found
    names = sorted(model.model_fields)
    close = get_close_matches(str(name), names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(names)}"


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models in a type such as `tuple[Level, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


_AS_IT_IS = {
    "missing": "is missing",
    "extra_forbidden": "there is no such field",
    "string_too_short": "is empty",
}

_WITH_INPUT = {
    "literal_error": "{found} is not known here: write {expected}",
    "greater_than": "{found} is too small: give more than {gt}",
    "greater_than_equal": "{found} is too small: give {ge} or more",
    "less_than": "{found} is too large: give less than {lt}",
    "less_than_equal": "{found} is too large: give {le} or less",
    "finite_number": "{found} is no finite number",
    "int_type": "{found} is no whole number",
    "int_parsing": "{found} is no whole number",
    "int_from_float": "{found} is no whole number",
    "float_type": "{found} is no number",
    "float_parsing": "{found} is no number",
    "bool_type": "{found} is neither true nor false",
    "bool_parsing": "{found} is neither true nor false",
    "string_type": "{found} is no text",
    "dict_type": "{found} is no set of named fields",
    "model_type": "{found} is no set of named fields",
    "list_type": "{found} is no list",
    "tuple_type": "{found} is no list",
    "too_short": "{found} is too short: give {min_length} or more",
    "too_long": "{found} is too long: give {max_length} or fewer",
}


def worded(error: ErrorDetails) -> str:
    """One finding of a ValidationError, without the field's name; pydantic's own words where it
    is of a kind that our files do not meet.
    """
    kind = error["type"]
    if kind in _AS_IT_IS:
        return _AS_IT_IS[kind]
    if kind not in _WITH_INPUT:
        return error["msg"].removeprefix("Value error, ")
    if error["input"] is None:
        return "is empty"
    limits: Mapping[str, Any] = error.get("ctx", {})
    return _WITH_INPUT[kind].format(found=_shown(error["input"]), **limits)


def _shown(value: Any) -> str:
    """As it stands in YAML, more or less."""
    return str(value).lower() if isinstance(value, bool) else shortened(value)
