from __future__ import annotations

import gc

import pytest

from pipedream.profiler.collecting import without_collecting


def test_garbage_is_collected_again_afterwards_unless_it_was_not_before() -> None:
    with without_collecting():
        with pytest.raises(ValueError, match="fails"), without_collecting():
            raise ValueError("fails")
        assert not gc.isenabled()
    assert gc.isenabled()
