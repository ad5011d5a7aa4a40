"""Tries divisions: makes the plan of each under the request, and simulates it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from pipedream.graph.plan import Plan
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.cuts.planning_graph import Floats
from pipedream.optimizer.search.outcome import placed_plan, unweighed_plan
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.optimizer.simulate.simulator import QUICK_MOVES, simulate_work

_TRIAL, _NODE = 2_000, 5
"""What a trial costs besides its actions, and for each node of the graph, counted in actions."""

_SLACK = (1, 2, 4, 8, 16)
"""What is tried where messages take longer than they should."""

_NEAR, _GAIN = 1.02, 0.01
"""A division so near to its bound is not tried with more in flight, nor given it for less."""


@dataclass(frozen=True)
class Trial:
    """A division with its plan and simulation; `fits`: within the memory of its devices; `why` it
    takes as long as it does, in words; `bound`: what its stages and ports take at least, in seconds
    per minibatch.
    """

    division: Division
    plan: Plan
    simulation: Simulation
    fits: bool
    why: str
    bound: float

    @property
    def seconds(self) -> float:
        """Simulated, per minibatch; infinite if it does not fit."""
        return self.simulation.seconds_per_minibatch if self.fits else inf


class Trials:
    """All that has been tried for a request; `spent`: about how many actions were simulated."""

    def __init__(self, request: Request, most_moves: int = QUICK_MOVES) -> None:
        self.request, self.graph = request, request.planning
        self.most_moves = most_moves
        self.known: dict[Division, Trial | None] = {}
        self.bounds: dict[Division, float] = {}
        self.spent = 0

    def try_out(self, division: Division, within: float = inf) -> Trial | None:
        """None if it takes longer than `within` or too long to simulate, or if stages would each
        learn their own of a parameter; raises UserError where the schedule does not allow it.
        """
        if not all(map(self.request.allows, division.downsets)):
            return None
        if division in self.known:
            return self.known[division]
        if division not in self.bounds:
            self.bounds[division] = self._passes(division)
        if self.bounds[division] > within:
            return None
        self.spent += _TRIAL + _NODE * len(self.graph)
        return self._try(division, within)

    def settle(self, division: Division) -> Trial | None:
        """The division with as many minibatches in flight as bring it near to what stages and ports
        take at least, or that help most: streams that share ports delay each other in ways that
        only a simulation tells. Raises UserError as `try_out` does.
        """
        best = self.try_out(division)
        for slack in _SLACK:
            if best is None or best.seconds <= best.bound * _NEAR:
                break
            other = self.try_out(division._replace(slack=slack))
            if other is not None and other.seconds < best.seconds * (1 - _GAIN):
                best = other
        return best

    def _try(self, division: Division, within: float) -> Trial | None:
        request = self.request
        cuts, placed = division.cuts(self.graph), division.placed(request.cluster)
        if request.constrains_stages(request.device_types):
            memory = request.memory_model(cuts)
            plan, form, workers = placed_plan(memory, request, placed, division.slack)
        else:
            plan, form, workers = unweighed_plan(cuts, request, placed, division.slack, within)
        self.bounds[division] = form.bound
        if form.bound > within:
            return None
        self.known[division] = None
        simulation = simulate_work(plan, form.workload, self.most_moves)
        if simulation is None:
            return None
        self.spent += len(simulation.program.op)
        fits = all(worker.share <= 1 for worker in workers)
        trial = Trial(division, simulation.noted_in(plan), simulation, fits, form.why, form.bound)
        self.known[division] = trial
        return trial

    def _passes(self, division: Division) -> float:
        """Seconds per minibatch that the passes of the busiest stage take at least."""
        slowest, before = 0.0, 0
        for downset, own in zip(division.downsets, division.ranks, strict=True):
            speed = min(self._speeds[rank] for rank in own)
            slowest = max(slowest, self._seconds(downset & ~before) / len(own) / speed)
            before = downset
        return slowest

    @cached_property
    def _speeds(self) -> list[float]:
        cluster = self.request.cluster
        return [cluster.device(rank).speed for rank in range(cluster.devices)]

    def _seconds(self, nodes: int) -> float:
        if nodes not in self._sums:
            width = -(-len(self.graph) // 8)
            bits = np.unpackbits(
                np.frombuffer(nodes.to_bytes(width, "little"), dtype=np.uint8),
                count=len(self.graph),
                bitorder="little",
            )
            self._sums[nodes] = float(self._compute @ bits)
        return self._sums[nodes]

    @cached_property
    def _compute(self) -> Floats:
        return self.graph.compute_seconds

    @cached_property
    def _sums(self) -> dict[int, float]:
        return {}
