"""The words of a command, from keyword arguments, and these checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from pipedream.graph.errors import UserError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def words(options: Mapping[str, Any]) -> Iterator[str]:
    """Yields `--name value` for each: `save_every=4` is `--save-every 4`, True alone is a flag,
    False and None are left out, the items of a tuple or a list stand with commas between.
    """
    for name, value in options.items():
        if value is None or value is False:
            continue
        yield f"--{name.replace('_', '-')}"
        if isinstance(value, (tuple, list)):
            yield ",".join(map(str, value))
        elif value is not True:
            yield str(value)


def checked(
    function: Callable[_Arguments, _Result], options: Collection[str] = ()
) -> Callable[_Arguments, _Result]:
    """Wraps `function`: UserError for arguments that neither it nor the `options` have."""
    signature = inspect.signature(function)
    name = function.__name__
    own = [each.name for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for key in kwargs:
            if key not in (*own, *options):
                raise UserError(f"{name}: there is no {key}={_instead(key, (*own, *options))}")
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UserError(f"{name}: {error}: write {name}{_shown(signature)}") from error
        return function(*args, **kwargs)

    return call


def _instead(key: str, known: Iterable[str]) -> str:
    """Returns `; did you mean schedule=?`, or all that there are."""
    names = sorted(set(known))
    close = get_close_matches(key, names, n=1)
    return f"; did you mean {close[0]}=?" if close else f"; there are {', '.join(names)}"


def _shown(signature: inspect.Signature) -> str:
    """Returns the arguments without types and defaults: `(model, inputs, *, loss)`."""
    bare = [
        each.replace(annotation=each.empty, default=each.empty)
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))
