"""Leaves out what is marked `thorough` or `one_in`, but for `scripts/test.sh --all`."""

from __future__ import annotations

from collections import Counter

import pytest
from amount import ALL


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ALL:
        return
    cases: Counter[str] = Counter()

    def is_left_out(item: pytest.Item) -> bool:
        if item.get_closest_marker("thorough"):
            return True
        one_in = item.get_closest_marker("one_in")
        if one_in is None:
            return False
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        return bool((cases[test] - 1) % one_in.args[0])

    left_out = {item for item in items if is_left_out(item)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
