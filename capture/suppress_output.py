"""What torch prints on its own when it cannot do a thing: the error says it in one line."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


@contextmanager
def suppress_output() -> Iterator[None]:
    """Keeps torch.export's log lines and printed graphs from stderr; exceptions pass."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
