"""Backends of torch.compile that tests make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo import register_backend
from torch._dynamo.backends.registry import _BACKENDS

_NAME = "made_by_a_test"


@contextmanager
def registered(backend: Callable[..., Any]) -> Iterator[str]:
    """Yields a name of the backend; inside of it nothing is compiled yet."""
    torch._dynamo.reset()
    register_backend(backend, name=_NAME)  # type: ignore[arg-type]
    try:
        yield _NAME
    finally:
        del _BACKENDS[_NAME]
