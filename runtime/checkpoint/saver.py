"""Saving beside the training: the tensors are copied, training goes on, a thread writes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch._C._distributed_c10d import Store

from pipedream.comm.device.threads import start_thread
from pipedream.comm.messages import PeerLost
from pipedream.runtime.checkpoint import files as checkpoint
from pipedream.runtime.run.training_segment import Position

_SECONDS_BETWEEN_LOOKS = 0.02

CheckpointPart: TypeAlias = tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
"""Of one stage: its parameters and buffers, and what its optimizer remembers."""


@dataclass
class Saver:
    """The saves of one rank, one at a time: the next begins when the last is done.

    The first replica of each of the `stages` writes its part and marks it in the store. Rank 0
    (`publishes`) waits for all parts, and until the run's records have come as far (`recorded`),
    since a run resumed from here does not write earlier ones again. It makes the checkpoint valid
    and deletes all but the newest `keep`. An error in the thread is raised by the next `begin` or
    `end`: UserError if the disk refuses, PeerLost if a stage is not done within `timeout` seconds.
    """

    folder: Path
    stages: int
    store: Store
    publishes: bool
    timeout: float
    keep: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    details: Mapping[str, str | int | float] | None = None
    recorded: Callable[[Position], bool] = lambda position: True
    thread: threading.Thread | None = field(default=None, init=False)
    failure: BaseException | None = field(default=None, init=False)

    def begin(
        self, position: Position, parts: Mapping[int, CheckpointPart], training: Mapping[str, Any]
    ) -> None:
        """Saves copies of the tensors, made at a moment when nothing is in flight on this rank.

        `parts` are those of the stages that this rank writes; nobody changes them any more.
        """
        self.end()
        if parts or self.publishes:
            save = partial(self._save, position, dict(parts), dict(training))
            self.thread = start_thread(save, "save", self.device)

    def end(self) -> None:
        """Waits until the last save is done."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.failure is not None:
            raise self.failure

    def _save(
        self, position: Position, parts: Mapping[int, CheckpointPart], training: Mapping[str, Any]
    ) -> None:
        try:
            for stage, part in parts.items():
                checkpoint.write_stage(self.folder, position, stage, self.stages, *part)
                self.store.set(self._key(position, stage), "written")
            if self.publishes:
                self._publish(position, training)
        except BaseException as error:
            self.failure = error

    def _publish(self, position: Position, training: Mapping[str, Any]) -> None:
        keys = [self._key(position, stage) for stage in range(self.stages)]
        deadline = time.monotonic() + self.timeout
        # Not `wait`: it would keep all other threads from the store.
        while not (self.recorded(position) and self.store.check(keys)):
            if time.monotonic() > deadline:
                raise PeerLost(f"not all stages have saved {position}")
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        for key in keys:
            self.store.delete_key(key)
        checkpoint.publish(self.folder, position, self.stages, training, self.details)
        if self.keep is not None:
            checkpoint.keep_newest(self.folder, self.keep)

    def _key(self, position: Position, stage: int) -> str:
        return f"saved/{position}/{stage}"
