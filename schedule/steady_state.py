"""How long a minibatch takes in the steady state, from when the backward passes of one rank end."""

from __future__ import annotations

import time


class Pace:
    """Over all epochs of a run; of each the first `warm_up` passes fill the pipeline."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.whole = self.steady = 0.0
        self.passes = self.counted = 0

    def begin_epoch(self) -> None:
        self.begun = time.perf_counter()
        self.seen = 0

    def passed(self) -> None:
        """A backward pass has ended."""
        self.last = time.perf_counter()
        if self.seen == self.warm_up:
            self.first = self.last
        self.seen += 1

    def end_epoch(self) -> None:
        self.whole += time.perf_counter() - self.begun
        self.passes += self.seen
        if self.seen > self.warm_up:
            self.steady += self.last - self.first
            self.counted += self.seen - self.warm_up - 1

    def seconds_per_minibatch(self, replicas: int) -> float:
        """Where the filling leaves nothing, the whole time is taken. `replicas` of the stage."""
        if self.counted:
            return self.steady / (self.counted * replicas)
        return self.whole / max(1, self.passes * replicas)
