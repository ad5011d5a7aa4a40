"""Long texts from rank to rank through the store, whose messages are 8 MiB at most."""

from __future__ import annotations

import json
from typing import Any

from torch._C._distributed_c10d import Store

_PIECE = 1 << 20


def tell(store: Store, key: str, value: Any) -> None:
    """Leaves `value` (what JSON can hold) in the store for one other to `hear`."""
    text = json.dumps(value)
    pieces = [text[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(key, str(len(pieces)))


def hear(store: Store, key: str) -> Any:
    """What another rank told under `key`, once it has; the store forgets it."""
    keys = [f"{key}/{number}" for number in range(int(store.get(key)))]
    text = b"".join(store.get(piece) for piece in keys)
    for used in (key, *keys):
        store.delete_key(used)
    return json.loads(text)
