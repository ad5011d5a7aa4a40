"""Ways that were found before, kept on disk by operator and version of torch.

An operator of the user's own may change under its name: ranks try what they use again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from filelock import FileLock
from pydantic import TypeAdapter, ValidationError

from pipedream.graph.command import write_whole
from pipedream.graph.placements.operators import Operator, Way
from pipedream.profiler.discovery.separate import Outcome, tried

_SEARCH = 2
"""Another number forgets what was found so far: raise it where the search finds other ways."""
_MOST = 20_000
"""Operators that are kept; then all are forgotten."""
_Kept = TypeAdapter(dict[str, tuple[tuple[Way, ...], str]])


def discover(operators: Sequence[Operator], folder: Path | None = None) -> dict[Operator, Outcome]:
    """Returns the ways to divide each operator, or why there are none. What is not known yet is
    found now, and kept in the folder, by default one of the user's cache.
    """
    path = (folder or _cache()) / "discovered.json"
    known, keys = _read(path), {each: _key(each) for each in operators}
    missing = [each for each, key in keys.items() if key not in known]
    if missing:
        fresh = dict(zip((keys[each] for each in missing), tried(missing), strict=True))
        known |= fresh
        with suppress(OSError):  # as where the cache cannot be written
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_suffix(".lock"), timeout=5):
                kept = _read(path) | fresh
                write_whole(path, _Kept.dump_json(kept if len(kept) <= _MOST else fresh))
    return {each: known[key] for each, key in keys.items()}


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "pipedream"


def _read(path: Path) -> dict[str, Outcome]:
    """Returns what is kept; nothing if the file is none of ours."""
    try:
        return _Kept.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return {}


def _key(operator: Operator) -> str:
    text = f"{_SEARCH} {torch.__version__} {operator.model_dump_json()}"
    return hashlib.sha256(text.encode()).hexdigest()
