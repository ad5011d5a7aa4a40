"""Files written whole or not at all: whoever reads one sees the old content or the new."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a path beside, with the same suffix, to write to; it takes the place of `path` once
    the block is over, and goes if the block raises.
    """
    fresh = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes the text in UTF-8. Raises OSError."""
    with whole(path) as fresh:
        fresh.write_text(text, encoding="utf-8")
