"""Backends of torch.compile that tests make."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch._dynamo import register_backend

_NUMBERS = count()


def registered(backend: Callable[..., Any]) -> str:
    """Returns a name of the backend; nothing is compiled yet."""
    torch._dynamo.reset()
    name = f"made_by_a_test_{next(_NUMBERS)}"
    register_backend(backend, name=name)  # type: ignore[arg-type]
    return name
