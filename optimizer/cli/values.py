"""Options from their values: those given, those of an earlier plan, and the defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipedream.graph.errors import UserError
from pipedream.optimizer.cli.options import Bounds, ModelInMemory, Options, OptionType, option_types


def make_options(graph: Path | ModelInMemory, given: Mapping[str, Any]) -> Options:
    """The options `given` by Python name; the others are those of the plan that `like` names, or of
    the newest run in `calibrate`, or the defaults.

    None and False are as if not given. Values may be words as on a command line; items of a tuple
    or a list stand with commas between, where the option is not one to repeat. Raises UserError.
    """
    typed = _checked(given)
    earlier = _checked(_earlier(typed))
    if "mesh" in typed and earlier.get("intra_op") == "none":
        del earlier["intra_op"]
    return Options(graph, **{**earlier, **typed}, typed=frozenset(typed))


def _earlier(typed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options of the plan that they name."""
    if "like" in typed:
        from pipedream.graph.plan import read_plan
        from pipedream.optimizer.cli.like import options_of

        return options_of(read_plan(typed["like"]), typed["like"])
    if "calibrate" in typed:
        from pipedream.optimizer.calibrate.runs import CalibrationRun
        from pipedream.optimizer.cli.like import options_after

        return options_after(CalibrationRun.read(typed["calibrate"][-1]))
    return {}


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: value for name, value in given.items() if value is not None}
    return {name: _values(name, value) for name, value in known.items() if value is not False}


def _values(name: str, value: Any) -> Any:
    """Returns the value of the option, or a tuple if it has several. Raises UserError."""
    kind = option_types()[name]
    is_list = isinstance(value, (tuple, list))
    try:
        if kind.several:
            return tuple(_value(kind, each) for each in (value if is_list else (value,)))
        return _value(kind, ",".join(map(str, value)) if is_list else value)
    except ValueError as error:
        option = "--" + name.replace("_", "-")
        raise UserError(f"Invalid value for '{option}': {error}") from None


def _value(kind: OptionType, value: Any) -> Any:
    """Returns the value. Raises ValueError, in the words of the command line."""
    if kind.of is bool:
        if value is not True:
            raise ValueError(f"{value!r} is neither True nor False.")
        return True
    text = str(value)
    if kind.choice is not None and text not in kind.choice:
        raise ValueError(f"{text!r} is not one of {', '.join(map(repr, kind.choice))}.")
    if kind.of in (str, Path):
        return kind.of(text)
    assert kind.bounds is not None
    return _number(kind.of, kind.bounds, text)


def _number(of: type, bounds: Bounds, text: str) -> Any:
    try:
        number = of(text)
    except ValueError:
        what = "integer" if of is int else "float"
        raise ValueError(f"{text!r} is not a valid {what} range.") from None
    too_small = number < bounds.least or (bounds.above and number == bounds.least)
    if too_small or (bounds.most is not None and number > bounds.most):
        least = f"x>{'' if bounds.above else '='}{bounds.least}"
        both = f"{bounds.least}<=x<={bounds.most}"
        wanted = least if bounds.most is None else both
        raise ValueError(f"{number} is not in the range {wanted}.")
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number
