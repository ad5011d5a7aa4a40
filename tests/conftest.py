"""Leaves out the tests marked `thorough` unless `scripts/test.sh --all` runs them."""

from __future__ import annotations

import pytest
from amount import ALL


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ALL:
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
