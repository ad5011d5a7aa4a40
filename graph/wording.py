"""What pydantic finds wrong in a file, in the words that the tools use for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any

from pydantic_core import ErrorDetails

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
