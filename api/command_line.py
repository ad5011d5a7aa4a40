"""The words of a command, from keyword arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import click

from pipedream.graph.errors import UserError


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


def check_names(options: Mapping[str, Any], function: str, command: click.Command) -> None:
    """Raises UserError if the command has no option of one of these names."""
    known = {
        name.removeprefix("--").replace("-", "_")
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.expose_value
        for name in parameter.opts
        if name.startswith("--")
    }
    for name in options:
        if name not in known:
            close = get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean {close[0]}?" if close else f"they are those of {command.name}"
            raise UserError(f"{function}: no option is called {name}; {hint}")
