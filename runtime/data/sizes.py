"""How many examples each minibatch of an epoch has: the last one may have fewer. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Minibatches of `batch_size` of the examples; with `drop_last` the rest is skipped.

    Every rank knows them before it begins, so no shapes are sent between ranks.
    """

    examples: int
    batch_size: int
    drop_last: bool = False

    def __len__(self) -> int:
        """The number of minibatches."""
        return self.examples // self.batch_size + bool(self.rest)

    @property
    def rest(self) -> int:
        """The examples of the last minibatch where they are fewer than `batch_size`; else 0."""
        return 0 if self.drop_last else self.examples % self.batch_size

    @property
    def last(self) -> int | None:
        """The number of the minibatch that is smaller than the others, if there is one."""
        return len(self) - 1 if self.rest else None

    def of(self, minibatch: int) -> int:
        return self.rest if minibatch == self.last else self.batch_size
