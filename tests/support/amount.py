"""How much the tests try: all that they can in `scripts/test.sh --all`, a part of it by default."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

ALL = os.environ.get("PIPEDREAM_TESTS") == "all"


def examples(most: int) -> int:
    """How many random examples to try of `most`: a tenth by default, but not fewer than ten."""
    return most if ALL else min(most, max(10, most // 10))


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """All cases for `parametrize`, of which only one in `count` is tried by default."""
    return [
        pytest.param(case, marks=pytest.mark.thorough if index % count else ())
        for index, case in enumerate(cases)
    ]
