"""How much the tests try: all that they can in `scripts/test.sh --all`, a part of it by default."""

from __future__ import annotations

import os

ALL = os.environ.get("PIPEDREAM_TESTS") == "all"


def examples(most: int) -> int:
    """How many random examples to try of `most`: a tenth by default, but not fewer than ten."""
    return most if ALL else min(most, max(10, most // 10))
