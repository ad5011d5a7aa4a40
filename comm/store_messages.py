"""Messages of any length between ranks through the store, whose values are at most 8 MiB."""

from __future__ import annotations

import json
import time
from typing import Any

from torch._C._distributed_c10d import Store

from pipedream.comm.rank_info import RankInfo

_PIECE = 1 << 20
_SECONDS_BETWEEN_LOOKS = 0.002


def send_message(store: Store, key: str, value: Any) -> None:
    """Leaves `value` (anything JSON can hold) in the store for one other rank to receive."""
    text = json.dumps(value)
    pieces = [text[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(key, str(len(pieces)))


def receive_message(store: Store, key: str) -> Any:
    """Returns what another rank sent under `key`, once it has; it is removed from the store.

    Waits without limit: whoever watches the ranks ends this one if the other is lost.
    """
    while not store.check([key]):  # not `get`: it would keep all other threads from the store
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    keys = [f"{key}/{number}" for number in range(int(store.get(key)))]
    text = b"".join(store.get(piece) for piece in keys)
    for used in (key, *keys):
        store.delete_key(used)
    return json.loads(text)


def broadcast(store: Store, rank_info: RankInfo, key: str, value: Any) -> Any:
    """Returns rank 0's `value` on every rank, once rank 0 has come here."""
    if rank_info.rank > 0:
        return receive_message(store, f"{key}/{rank_info.rank}")
    for rank in range(1, rank_info.world_size):
        send_message(store, f"{key}/{rank}", value)
    return value
