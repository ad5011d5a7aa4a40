"""Long texts pass through a store whose messages are short."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from pipedream.comm import store_messages


def test_what_is_told_is_heard_once(monkeypatch):
    monkeypatch.setattr(store_messages, "_PIECE", 7)
    store, value = HashStore(), {"rank": 3, "seen": ["0F0", 1.25, None], "name": "größer"}
    store_messages.send_message(store, "report/3", value)
    assert store_messages.receive_message(store, "report/3") == value
    assert not store.check(["report/3"])
    assert not store.check(["report/3/0"])


@pytest.mark.parametrize("value", [[], {}, None, ""])
def test_little_is_heard_too(value):
    store = HashStore()
    store_messages.send_message(store, "key", value)
    assert store_messages.receive_message(store, "key") == value
