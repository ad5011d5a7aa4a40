"""Tries divisions under the schedule of a request, with as many minibatches in flight as help."""

from __future__ import annotations

import numpy as np

from pipedream.graph.plan import DraftPlan
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.choose.trial import Trial, Trials
from pipedream.optimizer.search.placed_plan import placed_plan
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.optimizer.simulate.simulator import QUICK_MOVES, simulate_work
from pipedream.optimizer.simulate.workload import Workload

_TRIAL, _NODE = 2_000, 5
"""What a trial costs besides its actions, and for each node of the graph, counted in actions."""

_SLACK = (1, 2, 4, 8, 16)
"""What is tried where messages take longer than they should."""

_NEAR, _GAIN = 1.02, 0.01
"""A division so near to its bound is not tried with more in flight, nor given it for less."""


class PlacedTrials(Trials[Trial]):
    """All that has been tried in the order 1F1B; `spent`: about how many actions were simulated."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.effort = _TRIAL + _NODE * len(self.graph)
        self.bounds: dict[Division, float] = {}
        self._played: dict[tuple[Division, tuple[int, ...] | None], Simulation | None] = {}
        self._sums: dict[int, float] = {}
        cluster = request.cluster
        self._speeds = [cluster.device(rank).speed for rank in range(cluster.devices)]

    def least(self, division: Division) -> float:
        """What the passes of its busiest stage take, or its stages and ports if that is known."""
        if division not in self.bounds:
            self.bounds[division] = self._passes(division)
        return self.bounds[division]

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

    def priced(self, division: Division) -> Request | None:
        """The request with the times and sizes that the nodes have in this division; None where
        finding them out would take too long.
        """
        return self.request

    def make(self, division: Division, within: float) -> Trial | None:
        request = self.priced(division)
        if request is None:
            return None
        cuts, placed = division.cuts(request.planning), division.placed(request.cluster)
        limited = request.constrains_stages(request.device_types)
        memory = request.memory_model(cuts) if limited else None
        plan, form, workers = placed_plan(cuts, request, placed, memory, division.slack, within)
        self.bounds[division] = form.bound
        if form.bound > within:
            return None
        self.known[division], self.plans = None, self.plans + 1
        simulation = self._simulated(division, plan, form.workload)
        if simulation is None:
            return None
        fits = all(worker.share <= 1 for worker in workers)
        trial = Trial(division, simulation.noted_in(plan), simulation, fits, form.why, form.bound)
        self.known[division] = trial
        return trial

    def _simulated(
        self, division: Division, plan: DraftPlan, workload: Workload
    ) -> Simulation | None:
        """With as many minibatches in flight as memory allows, more slack may change nothing."""
        key = division._replace(slack=1), plan.max_in_flight
        if key not in self._played:
            simulation = simulate_work(plan, workload, QUICK_MOVES, rough=True)
            self.spent += 0 if simulation is None else len(simulation.program.op)
            self._played[key] = simulation
        return self._played[key]

    def _passes(self, division: Division) -> float:
        """Seconds per minibatch that the passes of the busiest stage take at least."""
        slowest, before = 0.0, 0
        for downset, own in zip(division.downsets, division.ranks, strict=True):
            speed = min(self._speeds[rank] for rank in own)
            slowest = max(slowest, self._seconds(downset & ~before) / len(own) / speed)
            before = downset
        return slowest

    def _seconds(self, nodes: int) -> float:
        if nodes not in self._sums:
            width = -(-len(self.graph) // 8)
            bits = np.unpackbits(
                np.frombuffer(nodes.to_bytes(width, "little"), dtype=np.uint8),
                count=len(self.graph),
                bitorder="little",
            )
            self._sums[nodes] = float(self.graph.compute_seconds @ bits)
        return self._sums[nodes]
