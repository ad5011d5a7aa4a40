"""The machines: levels of components, innermost first, each level with its bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from pydantic import BaseModel, ConfigDict, model_validator


class Cluster(BaseModel):
    """`machines=(4, 2), bandwidth=(1e10, 1e9)`: 4 devices in a machine at 10 GB/s, 2 machines at
    1 GB/s. Bandwidths in bytes per second. Alpa calls this the 2 x 4 mesh.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    machines: tuple[int, ...]
    bandwidth: tuple[float, ...]

    @model_validator(mode="after")
    def _check(self) -> Cluster:
        if not self.machines:
            raise ValueError("a cluster has at least one level of machines")
        if len(self.machines) != len(self.bandwidth):
            raise ValueError(
                f"{len(self.machines)} levels of machines but {len(self.bandwidth)} bandwidths"
            )
        if any(count < 1 for count in self.machines):
            raise ValueError("every level has at least 1 machine")
        if not all(0 < speed < math.inf for speed in self.bandwidth):
            raise ValueError("every bandwidth is a positive number of bytes per second")
        return self

    @property
    def devices(self) -> int:
        return math.prod(self.machines)

    def rank(self, place: tuple[int, ...]) -> int:
        """The rank of a device, `place` giving its index at each level, innermost first.

        The innermost level counts fastest: on 4,2 place (1, 1) is rank 5.
        """
        assert len(place) == len(self.machines)
        rank = 0
        for index, count in zip(reversed(place), reversed(self.machines), strict=True):
            assert 0 <= index < count
            rank = rank * count + index
        return rank

    def places(self) -> Iterator[tuple[int, ...]]:
        """Every device's place, in the order of the ranks."""
        outermost_first = product(*(range(count) for count in reversed(self.machines)))
        return (tuple(reversed(place)) for place in outermost_first)
