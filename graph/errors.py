"""One-line errors for mistakes of the user, and JSON and YAML files read and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from pipedream.graph.command import UserError as UserError

Model = TypeVar("Model", bound=BaseModel)

_TAG = "tag:yaml.org,2002:"
_TEXT, _DATE = f"{_TAG}str", f"{_TAG}timestamp"
_TYPES = ("null", "bool", "int", "float", "str", "seq", "map")
_MOST_FIELDS, _MOST_NESTED, _MOST_TEXT = 10_000, 50, 100_000


_FILES = {
    "run": ("a run config", "pd-train takes it as --config, pd-profile as MODEL"),
    "plan": ("a plan", "pd-train takes it as PLAN"),
    "profile": ("a profile", "pd-optimize reads it beside graph.txt: name that"),
    "operators": ("the operators of a profile", "pd-optimize reads it beside graph.txt: name that"),
    "cluster": ("a cluster file", "pd-optimize takes it as --cluster"),
    "measured": ("a measured run", "pd-optimize takes it with --calibrate"),
    "graph": ("a graph", "pd-optimize takes it as GRAPH"),
}
"""What files are, by the word in their `format`, and where they belong."""


class ArtifactModel(BaseModel):
    """The base of everything that JSON and YAML files hold: frozen, and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class _Yaml(yaml.SafeLoader):
    """YAML as people write it: `1e-3` is a number, as in YAML 1.2 (in YAML 1.1 it is a string), and
    a field that is given twice is an error (PyYAML takes the last). Numbers, text, lists and named
    fields are all there is: what looks like a date is text.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - as its base declares it
        first: [pair for pair in pairs if pair[0] != _DATE]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012 - as its base declares it
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in _TYPES
    }

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth > _MOST_NESTED:
            raise yaml.composer.ComposerError(problem="nested too deeply")
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Fields merged by `<<` may multiply: a file of a kilobyte can ask for all memory."""
        super().flatten_mapping(node)
        if len(node.value) > _MOST_FIELDS:
            raise yaml.constructor.ConstructorError(
                problem=f"more than {_MOST_FIELDS} fields", problem_mark=node.start_mark
            )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != _TEXT:
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is given twice: remove one of them",
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
    """Returns the text of a UTF-8 file. Raises UserError `FILE: cannot be read: why`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read: not a text file in UTF-8") from error


def check_kind(path: Path, text: str, wanted: str) -> None:
    """Raises UserError if the text is a file of another kind than `wanted`, a word of `_FILES`."""
    named = re.search(r'"?format"?\s*:\s*"?pipedream-([a-z]+)/', text[:_MOST_TEXT])
    is_graph = re.match(r"\S+ -- .* -- forward_compute_time=", text) is not None
    kind = "graph" if is_graph else named[1] if named else wanted
    if kind == wanted or kind not in _FILES:
        return
    what, where = _FILES[kind]
    wants = f"; what is wanted here is {_FILES[wanted][0]}" if wanted in _FILES else ""
    raise UserError(f"{path}: this is {what}: {where}{wants}")


def read_artifact(path: Path, model: type[Model]) -> Model:
    """Reads a .json or .yaml file as `model`. Raises UserError that names file and field."""
    text = read_text(path)
    if "format" in model.model_fields:
        (format_, *_) = get_args(model.model_fields["format"].annotation)
        check_kind(path, text, str(format_).removeprefix("pipedream-").partition("/")[0])
    try:
        data = _parse_json(path, text) if path.suffix == ".json" else _parse_yaml(path, text)
    except RecursionError as error:
        raise UserError(f"{path}:1: nested too deeply") from error
    if not isinstance(data, dict):
        content = "nothing" if data is None else f"a {type(data).__name__}"
        raise UserError(f"{path}:1: expected named fields, found {content}")
    if "format" in model.model_fields and "format" not in data:
        raise UserError(f"{path}:1: format: is missing: is this the right file?")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{path}{_line(text, error)}: {_first(error, model)}") from error
    except UnicodeEncodeError as error:  # a message of pydantic's own cites it
        raise UserError(f"{path}:1: {error.object[error.start]!r} is not a character") from error


def _parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise UserError(f"{path}:1: not JSON: {error}") from error


def _parse_yaml(path: Path, text: str) -> Any:
    if len(text) > _MOST_TEXT:
        raise UserError(f"{path}: {len(text)} characters are too many: is this the right file?")
    try:
        return yaml.load(text, _Yaml)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = 1 if mark is None else mark.line + 1
        what = getattr(error, "problem", None) or "not YAML"
        raise UserError(f"{path}:{line}: {what}") from error
    except ValueError as error:  # an impossible date
        raise UserError(f"{path}:1: not YAML: {error}") from error


def _line(text: str, error: ValidationError) -> str:
    """Returns `:LINE` of the wrong field, or of the fields among which one is missing; JSON is also
    YAML.

    Empty if the error is in no field, or if the text (JSON) is long or cannot be read as YAML.
    """
    where = _foremost(error)["loc"]
    try:
        node = yaml.compose(text, _Yaml) if len(text) <= _MOST_TEXT else None
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


def _foremost(error: ValidationError) -> ErrorDetails:
    """Returns the first error, or an unknown field if a field is missing: it may be misspelt."""
    first, *others = error.errors()
    if first["type"] != "missing":
        return first
    return next((other for other in others if other["type"] == "extra_forbidden"), first)


def _first(error: ValidationError, model: type[BaseModel]) -> str:
    first = _foremost(error)
    where = ".".join(str(part).replace("\n", "\\n") for part in first["loc"])
    hint = _instead(first["loc"], model) if first["type"] == "extra_forbidden" else ""
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return (f"{where}: " if where else "") + worded(first) + hint + more


def _instead(where: Sequence[str | int], model: type[BaseModel]) -> str:
    """Returns a hint for an unknown field, the last of `where`: the closest name, or all names."""
    *outer, name = where
    for part in outer:
        if isinstance(part, str) and part in model.model_fields:
            inner = _models(model.model_fields[part].annotation)
            if len(inner) != 1:
                return ""
            (model,) = inner
    names = sorted(model.model_fields)
    close = get_close_matches(str(name), names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known fields: {', '.join(names)}"


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Returns the models in a type such as `tuple[Level, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


_TEXTS = {
    "missing": "is missing",
    "extra_forbidden": "unknown field",
    "string_too_short": "is empty",
    "literal_error": "{value} is not one of the choices: write {expected}",
    "greater_than": "{value} is too small: give more than {gt}",
    "greater_than_equal": "{value} is too small: give {ge} or more",
    "less_than": "{value} is too large: give less than {lt}",
    "less_than_equal": "{value} is too large: give {le} or less",
    "finite_number": "{value} is not a finite number",
    "int_type": "{value} is not a whole number",
    "int_parsing": "{value} is not a whole number",
    "int_from_float": "{value} is not a whole number",
    "float_type": "{value} is not a number",
    "float_parsing": "{value} is not a number",
    "bool_type": "{value} is neither true nor false",
    "bool_parsing": "{value} is neither true nor false",
    "string_type": "{value} is not text",
    "dict_type": "{value} is not a set of named fields",
    "model_type": "{value} is not a set of named fields",
    "list_type": "{value} is not a list",
    "tuple_type": "{value} is not a list",
    "too_short": "{value} is too short: give {min_length} or more",
    "too_long": "{value} is too long: give {max_length} or fewer",
}


def worded(error: ErrorDetails) -> str:
    """Returns the text of one error of a ValidationError, without the name of the field."""
    text = _TEXTS.get(error["type"])
    if text is None:
        return error["msg"].removeprefix("Value error, ")
    if error["input"] is None and "{value}" in text:
        return "is empty"
    return text.format(value=_shown(error["input"]), **error.get("ctx", {}))


def _shown(value: Any) -> str:
    """Returns the value roughly as it is written in YAML."""
    return str(value).lower() if isinstance(value, bool) else shortened(value)
