"""Corrects the times of nodes so that they add up to what stages were measured to take.

Nodes i were timed one by one, t_i; runs under one or several plans have measured sums of them, m_s
for the nodes of stage s. Nodes that no run tells apart, because every run had them in one stage,
make a *piece* p and get one factor, e^(u_p). It has T_p seconds, of which a device of stage s works
T_sp: all of them, where no mesh shares them. The factors are the least correction that explains the
measurements,

    min over u of  sum_s (log sum_{p in s} T_sp e^(u_p) - log m_s)^2 / E_s^2
                 + sum_p (u_p - c_p)^2 / K_p^2

where E_s is the relative error of a measured sum, and K_p the relative deviation allowed to the
factor of a piece from c_p, the mean of log m_s / T_s over the stages that it was in.

- In logarithms a factor is never negative, and half is as far as double.
- With one run the stages are the pieces and u = c solves it: every node of a stage gets the same
  factor, and the sums are those measured. The same holds for runs under one plan that agree.
- Where two plans cut at different nodes, the pieces between the cuts are told apart by what moving
  them changed. Without the second sum a piece of a few microseconds would absorb the whole
  difference between two runs of some milliseconds.

It is solved by the Levenberg-Marquardt method; there are as many unknowns as pieces: few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipedream.optimizer.cuts.planning_graph import Floats

UNLIKE = 0.3
"""K: relative deviation between pieces of one stage, where each node was timed exactly."""

_TOLERANCE = 1e-14


@dataclass(frozen=True)
class Observation:
    """The `nodes` of a stage, by number, took `seconds` together, give or take `error`; `shares`:
    the part of each that a device worked [default: all of it].
    """

    nodes: tuple[int, ...]
    seconds: float
    error: float
    shares: tuple[float, ...] | None = None

    def worked(self, seconds: Floats) -> Floats:
        """Of all nodes, the seconds that a device worked; 0 of those of other stages."""
        own, nodes = np.zeros_like(seconds), list(self.nodes)
        own[nodes] = seconds[nodes] * (1.0 if self.shares is None else self.shares)
        return own


def calibrate(
    seconds: Floats, observations: Sequence[Observation], spreads: Floats | None = None
) -> Floats:
    """The corrected `seconds` of each node; nodes without time or observation keep theirs.

    `spreads`: seconds by which each node may be off by itself. Nothing is learned from stages that
    take no time by `seconds`, or took none.
    """
    useful = [o for o in observations if o.seconds > 0 and o.worked(seconds).sum() > 0]
    if not useful:
        return seconds.copy()
    return seconds * _factors(
        seconds, useful, np.zeros_like(seconds) if spreads is None else spreads
    )


def _factors(seconds: Floats, observations: Sequence[Observation], spreads: Floats) -> Floats:
    """Returns the factor of each node; 1 for nodes in no piece.

    `inside[p, i]`: whether node i of the timed ones is in piece p; `sums[s, p]`: T_sp where p is in
    s, else 0; `logs[s]`: log m_s; `errors[s]`: E_s; `centre[p]`: c_p; `loose[p]`: K_p.
    """
    from scipy.optimize import least_squares

    within = np.zeros((len(seconds), len(observations)), dtype=np.bool_)
    for number, observation in enumerate(observations):
        within[list(observation.nodes), number] = True
    timed = np.flatnonzero(within.any(axis=1) & (seconds > 0))
    members, piece = np.unique(within[timed], axis=0, return_inverse=True)
    inside = piece.reshape(-1)[None, :] == np.arange(len(members))[:, None]
    whole = inside @ seconds[timed]
    measured = np.array([observation.seconds for observation in observations])
    errors = np.array([observation.error for observation in observations]) / measured
    worked = np.array([observation.worked(seconds)[timed] for observation in observations])
    sums, logs = worked @ inside.T, np.log(measured)
    centre = members @ (logs - np.log(sums.sum(axis=1))) / members.sum(axis=1)
    loose = np.hypot(UNLIKE, np.sqrt(inside @ np.square(spreads[timed])) / whole)

    def residuals(u: Floats) -> Floats:
        misfit = (np.log(sums @ np.exp(u)) - logs) / errors
        return np.concatenate([misfit, (u - centre) / loose])

    def jacobian(u: Floats) -> Floats:
        parts = sums * np.exp(u)
        slopes = parts / parts.sum(axis=1, keepdims=True)
        return np.vstack([slopes / errors[:, None], np.diag(1 / loose)])

    limits = dict.fromkeys(("ftol", "xtol", "gtol"), _TOLERANCE)
    u = least_squares(residuals, centre, jac=jacobian, method="lm", **limits).x
    factors = np.ones_like(seconds)
    factors[timed] = np.exp(u)[piece.reshape(-1)]
    return factors
