"""How passes vary from one to the next, at random and the same for a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipedream.optimizer.cuts.planning_graph import Floats

ASSUMED = tuple(1 + 0.01 * k for k in (-2, -1, -1, 0, 0, 0, 1, 1, 2))
"""Where the profile does not say how passes vary."""


@dataclass(frozen=True)
class Noise:
    """`spread`: equally likely times of a pass, as multiples of its median."""

    spread: Sequence[float]
    seed: int

    def factors(self, count: int) -> Floats:
        """Of so many passes."""
        drawn: Floats = np.random.default_rng(self.seed).choice(np.array(self.spread), count)
        return drawn
