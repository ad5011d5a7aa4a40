"""Stages on devices, as a search finds them, and the rules that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol, TypeAlias

from pipedream.optimizer.cuts.downsets import States
from pipedream.optimizer.cuts.planning_graph import Floats

TIE = 1e-11
"""Relative difference below which two costs are equal: rounding of a sum of a thousand terms."""


@dataclass(frozen=True)
class Rules:
    """`straight`: no replication. `fewer_machines`: components may be left unused."""

    straight: bool = False
    fewer_machines: bool = False


class CutFamily(Protocol):
    """The states of a search, as in `Cuts`: first the empty downset, last the whole graph."""

    @property
    def working(self) -> Floats:
        """The amount of work before each state; a stage without any is useless."""

    def __len__(self) -> int: ...

    def after(self, start: int, end: int) -> States:
        """The states up to `end` at which a stage from `start` may end."""


class Share(NamedTuple):
    """The part of a stage at one level (1 innermost).

    The stage runs from cut `start` to cut `end` on `replicas` components of the level below, and
    `first` says whether it begins the pipeline of its level. The components are those from number
    `offset` on, unless `chosen` lists them.
    """

    level: int
    start: int
    end: int
    offset: int
    replicas: int
    first: bool
    chosen: tuple[int, ...] = ()

    @property
    def components(self) -> Sequence[int]:
        return self.chosen or range(self.offset, self.offset + self.replicas)


class NestedStage(NamedTuple):
    """A stage on devices: its share of each level, innermost first."""

    shares: tuple[Share, ...]

    @property
    def start(self) -> int:
        return self.shares[0].start

    @property
    def end(self) -> int:
        return self.shares[0].end

    @property
    def replicas(self) -> int:
        return prod(share.replicas for share in self.shares)

    @property
    def machines(self) -> Sequence[int]:
        """The components of the outermost level that have a part in it."""
        return self.shares[-1].components


class PlacedStage(NamedTuple):
    """A stage on any devices: from cut `start` to cut `end`, on these `ranks` of these components
    of the outermost level.
    """

    start: int
    end: int
    ranks: tuple[int, ...]
    machines: tuple[int, ...]

    @property
    def replicas(self) -> int:
        return len(self.ranks)


StageOnDevices: TypeAlias = NestedStage | PlacedStage
"""What the memory of a stage depends on."""


class Solution(NamedTuple):
    """The stages found, and the cost of the costliest; or the seconds of a batch, with a lower
    `bound` over the same cuts.
    """

    cost: float
    stages: tuple[NestedStage, ...]
    bound: float = 0.0
