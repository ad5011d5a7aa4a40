"""The words of a command, from keyword arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


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
