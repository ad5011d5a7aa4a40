"""Python's search for garbage, which takes the more of the time the more objects there are."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Looks for no garbage inside: those who build large graphs keep nearly all they make."""
    was_enabled = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)  # nor in what is still there when the process ends
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
