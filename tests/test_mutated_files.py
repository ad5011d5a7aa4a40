"""No file, however broken, gives a traceback, a long wait or anything but one line.

`python scripts/fuzz.py` does the same for longer.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from mutated_files import READERS, mutated, read_mutated
from whole_files import whole_file

COUNT = 500


@pytest.mark.parametrize("name", READERS)
def test_the_whole_file_is_read(name: str, tmp_path: Path) -> None:
    assert read_mutated(READERS[name], whole_file(name), tmp_path) is None


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", READERS)
def test_a_mutated_file_is_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    data = whole_file(name)
    refused = 0
    for seed in range(COUNT):
        changed = mutated(data, random.Random(seed))
        try:
            refused += read_mutated(READERS[name], changed, tmp_path) is not None
        except Exception as error:
            raise AssertionError(f"seed {seed}: {changed[:2000]!r}") from error
    assert READERS[name].lenient or refused > COUNT // 10
