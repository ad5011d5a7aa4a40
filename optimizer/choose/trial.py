"""A division that has been tried, and the trials of a request, each made once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

from pipedream.graph.errors import UserError
from pipedream.graph.plan import DraftPlan
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulation import Simulation


@dataclass(frozen=True)
class Trial:
    """A division with its plan and simulation; `fits`: within the memory of its devices; `why` it
    takes as long as it does, in words; `bound`: what it takes at least, in seconds per minibatch.
    """

    division: Division
    plan: DraftPlan
    simulation: Simulation
    fits: bool
    why: str
    bound: float

    @property
    def simulated(self) -> float:
        """Seconds per minibatch, whether or not it fits."""
        return self.simulation.seconds_per_minibatch

    @property
    def seconds(self) -> float:
        """Simulated, per minibatch; infinite if it does not fit."""
        return self.simulated if self.fits else inf

    @property
    def rank(self) -> tuple[bool, float]:
        """The less the better: what fits comes first."""
        return not self.fits, self.simulated


T = TypeVar("T", bound=Trial)


class Trials(ABC, Generic[T]):
    """All divisions that have been tried for a request; `plans`: how many were made of them;
    `spent`: what that took, at least `effort` for each division.
    """

    effort = 1

    def __init__(self, request: Request) -> None:
        self.request, self.graph = request, request.planning
        self.known: dict[Division, T | None] = {}
        self.spent = self.plans = 0

    @abstractmethod
    def least(self, division: Division) -> float:
        """Seconds per minibatch that the division takes at least, found without a plan."""

    @abstractmethod
    def make(self, division: Division, within: float) -> T | None:
        """Makes the plan, simulates it, and notes in `known` what came of it; None without a note
        if it takes longer than `within`.
        """

    def try_out(self, division: Division, within: float = inf) -> T | None:
        """None if it takes longer than `within` or too long to simulate, or if stages would each
        learn their own of a parameter; raises UserError where the schedule does not allow it.
        """
        if not all(map(self.request.allows, division.downsets)):
            return None
        if division in self.known:
            return self.known[division]
        if self.least(division) > within:
            return None
        self.spent += self.effort
        return self.make(division, within)

    def tried(self, division: Division, within: float = inf) -> T | None:
        """As `try_out`, and None also where the schedule does not allow it."""
        try:
            return self.try_out(division, within)
        except UserError:
            return None
