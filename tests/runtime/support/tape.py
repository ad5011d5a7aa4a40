"""CUDA graphs on a CPU: operators are written down with their memory, and done again in it.

As on a GPU, what a recording returns is overwritten by the next replay, and it reads its inputs
where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipedream.runtime.run.job import Job
from pipedream.runtime.stages import recordings

T = TypeVar("T")
replays = 0
"""In this process."""


class Tape(TorchDispatchMode):
    """Writes down the operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, results))
        return results

    def replay(self) -> None:
        global replays
        replays += 1
        with torch.no_grad():
            for func, args, kwargs, results in self.done:
                given = {_memory(each) for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if _is_tensor(old) and _memory(old) not in given:  # else it is a view
                        old.copy_(new)


def record(run: Callable[[], T]) -> tuple[Callable[[], Any], T]:
    with Tape() as tape:
        results = run()
    return tape.replay, results


def install() -> None:
    """For the rest of this process, and those that it forks."""
    patch.object(recordings, "CudaRecorder", lambda: record).start()
    patch.object(Job, "check_recordings", lambda job: None).start()


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
