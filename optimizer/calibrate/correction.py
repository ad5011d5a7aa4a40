"""Corrects the times of nodes so that they add up to what stages were measured to take.

Nodes i were timed one by one, t_i; runs under one or several plans have measured sums of them, m_s
for the nodes of stage s. Nodes that no run tells apart, because every run had them in one stage,
make a *piece* p of T_p seconds and get one factor, e^(u_p). The factors are the least correction
that explains the measurements,

    min over u of  sum_s (log sum_{p in s} T_p e^(u_p) - log m_s)^2 / E_s^2
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

from pipedream.optimizer.cuts.planning_graph import Floats, Ints

UNLIKE = 0.3
"""K: relative deviation between pieces of one stage, where each node was timed exactly."""

_TOLERANCE = 1e-14


@dataclass(frozen=True)
class Observation:
    """The `nodes` of a stage, by number, took `seconds` together, give or take `error`."""

    nodes: tuple[int, ...]
    seconds: float
    error: float


def calibrate(
    seconds: Floats, observations: Sequence[Observation], spreads: Floats | None = None
) -> Floats:
    """The corrected `seconds` of each node; nodes without time or observation keep theirs.

    `spreads`: seconds by which each node may be off by itself. Nothing is learned from stages that
    take no time by `seconds`, or took none.
    """
    useful = [o for o in observations if o.seconds > 0 and seconds[list(o.nodes)].sum() > 0]
    if not useful:
        return seconds.copy()
    problem = _Problem.of(seconds, useful, np.zeros_like(seconds) if spreads is None else spreads)
    factors = np.append(np.exp(problem.solve()), 1.0)  # the last for nodes in no piece
    corrected: Floats = seconds * factors[problem.piece]
    return corrected


@dataclass(frozen=True)
class _Problem:
    """`piece[i]` is that of node i, -1 for none; `sums[s, p]` is T_p where p is in s, else 0.

    `logs[s]` is log m_s, `errors[s]` E_s, `centre[p]` c_p, `loose[p]` K_p.
    """

    piece: Ints
    sums: Floats
    logs: Floats
    errors: Floats
    centre: Floats
    loose: Floats

    @staticmethod
    def of(seconds: Floats, observations: Sequence[Observation], spreads: Floats) -> _Problem:
        within = np.zeros((len(seconds), len(observations)), dtype=np.bool_)
        for number, observation in enumerate(observations):
            within[list(observation.nodes), number] = True
        timed = np.flatnonzero(within.any(axis=1) & (seconds > 0))
        members, which = np.unique(within[timed], axis=0, return_inverse=True)
        piece = np.full(len(seconds), -1, dtype=np.intp)
        piece[timed] = which.reshape(-1)
        inside = piece[timed][None, :] == np.arange(len(members))[:, None]  # [piece, timed node]
        whole = inside @ seconds[timed]
        own = np.sqrt(inside @ np.square(spreads[timed])) / whole
        measured = np.array([observation.seconds for observation in observations])
        sums = members.T * whole
        logs = np.log(measured)
        factors = logs - np.log(sums.sum(axis=1))
        return _Problem(
            piece=piece,
            sums=sums,
            logs=logs,
            errors=np.array([observation.error for observation in observations]) / measured,
            centre=members @ factors / members.sum(axis=1),
            loose=np.hypot(UNLIKE, own),
        )

    def solve(self) -> Floats:
        """u, the logarithm of the factor of each piece."""
        from scipy.optimize import least_squares

        solution: Floats = least_squares(
            self._residuals,
            self.centre,
            jac=self._jacobian,
            method="lm",
            ftol=_TOLERANCE,
            xtol=_TOLERANCE,
            gtol=_TOLERANCE,
        ).x
        return solution

    def _residuals(self, u: Floats) -> Floats:
        misfit = (np.log(self.sums @ np.exp(u)) - self.logs) / self.errors
        return np.concatenate([misfit, (u - self.centre) / self.loose])

    def _jacobian(self, u: Floats) -> Floats:
        parts = self.sums * np.exp(u)
        slopes = parts / parts.sum(axis=1, keepdims=True)
        return np.vstack([slopes / self.errors[:, None], np.diag(1 / self.loose)])
