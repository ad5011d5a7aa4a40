"""Times of nodes corrected so that they add up to what stages were measured to take. Pure numpy.

Nodes i were timed one by one, t_i; runs under one plan or several have measured sums of them,
m_s for the nodes of stage s. Nodes that no run has told apart, those that were in one stage in
every run, make a *piece* p of T_p seconds and get one factor, e^(u_p): a run says nothing of what
goes on inside. What is sought is the least correction that explains what was measured,

    min over u of  sum_s (log sum_{p in s} T_p e^(u_p) - log m_s)^2 / E_s^2
                 + sum_p (u_p - c_p)^2 / K_p^2

where E_s is by what share a measured sum may be off, and K_p by what share the factor of a piece
may differ from c_p, the mean of log m_s / T_s over the stages that it was in.

- In logarithms a factor is never negative, and half is as far as double.
- Of one run the stages are the pieces, u = c solves it: every node of a stage gets the same factor,
  and the sums are those measured. The same goes for runs under one plan that agree.
- Where two plans cut at different nodes, the pieces between the cuts are told apart by what moving
  them has changed. Without the second sum a piece of few microseconds would get all that two runs
  of some milliseconds happened to differ by.

It is solved by Gauss and Newton's method (Nocedal and Wright, "Numerical Optimization", section
10.3), with steps halved until they help. The unknowns are as many as there are pieces: few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipedream.optimizer.cuts.planning_graph import Floats, Ints

UNLIKE = 0.3
"""K: by what share pieces of one stage are off differently, where each node was timed for sure."""

_MOST_STEPS, _MOST_HALVINGS = 100, 40
_CLOSE = 1e-12


@dataclass(frozen=True)
class Observation:
    """The `nodes` of a stage, by number, took so many `seconds` together, give or take `error`."""

    nodes: tuple[int, ...]
    seconds: float
    error: float


def calibrate(
    seconds: Floats, observations: Sequence[Observation], spreads: Floats | None = None
) -> Floats:
    """The `seconds` of each node, corrected; nodes that take none, or were not observed, stay.

    `spreads`: by how many seconds each may be off by itself. Of stages that take no time by
    `seconds`, or took none, nothing is learned.
    """
    told = [o for o in observations if o.seconds > 0 and seconds[list(o.nodes)].sum() > 0]
    if not told:
        return seconds.copy()
    problem = _Problem.of(seconds, told, np.zeros_like(seconds) if spreads is None else spreads)
    factors = np.append(np.exp(problem.solve()), 1.0)  # the last for what is in no piece
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
    def of(seconds: Floats, told: Sequence[Observation], spreads: Floats) -> _Problem:
        within = np.zeros((len(seconds), len(told)), dtype=np.bool_)
        for number, observation in enumerate(told):
            within[list(observation.nodes), number] = True
        timed = np.flatnonzero(within.any(axis=1) & (seconds > 0))
        members, which = np.unique(within[timed], axis=0, return_inverse=True)
        piece = np.full(len(seconds), -1, dtype=np.intp)
        piece[timed] = which.reshape(-1)
        inside = piece[timed][None, :] == np.arange(len(members))[:, None]  # [piece, timed node]
        whole = inside @ seconds[timed]
        own = np.sqrt(inside @ np.square(spreads[timed])) / whole
        measured = np.array([observation.seconds for observation in told])
        sums = members.T * whole
        logs = np.log(measured)
        factors = logs - np.log(sums.sum(axis=1))
        return _Problem(
            piece=piece,
            sums=sums,
            logs=logs,
            errors=np.array([observation.error for observation in told]) / measured,
            centre=members @ factors / members.sum(axis=1),
            loose=np.hypot(UNLIKE, own),
        )

    def solve(self) -> Floats:
        """u, the logarithm of the factor of each piece."""
        u, misfit = self.centre, self._misfit(self.centre)
        for _ in range(_MOST_STEPS):
            step = self._step(u)
            for halvings in range(_MOST_HALVINGS):
                there = u + step * 0.5**halvings
                better = self._misfit(there)
                if better <= misfit:
                    break
            else:
                return u
            gain, u, misfit = misfit - better, there, better
            if gain <= _CLOSE * misfit:
                return u
        return u

    def _misfit(self, u: Floats) -> float:
        return float(np.square(self._residuals(u)).sum())

    def _residuals(self, u: Floats) -> Floats:
        sums = np.log(self.sums @ np.exp(u)) - self.logs
        found: Floats = np.concatenate([sums / self.errors, (u - self.centre) / self.loose])
        return found

    def _step(self, u: Floats) -> Floats:
        parts = self.sums * np.exp(u)
        slopes = parts / parts.sum(axis=1, keepdims=True)
        jacobian = np.vstack([slopes / self.errors[:, None], np.diag(1 / self.loose)])
        step: Floats = np.linalg.lstsq(jacobian, -self._residuals(u), rcond=None)[0]
        return step
