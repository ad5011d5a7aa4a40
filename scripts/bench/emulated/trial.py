"""A plan, and for how many minibatches it is run: trained or simulated, it is the same schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from pipedream.graph.choices import MICROBATCHES
from pipedream.graph.model import Graph
from pipedream.graph.plan import Plan
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.optimizer.simulate.simulator import simulate, simulate_plan
from pipedream.optimizer.simulate.workload import UPDATE_RATE, Workload
from pipedream.schedule.policy import Policy, policy
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec
from pipedream.schedule.steady_state import SteadySpan

MOST_STEPS = 8
"""How often the pipeline is filled anew in the steady state, at most; or rounds of it."""


@dataclass(frozen=True)
class Trial:
    """A plan for `graph`, run for about so many seconds."""

    graph: Graph
    plan: Plan
    seconds: float

    @property
    def microbatches(self) -> int:
        """Of an update, for the schedules that make one for several minibatches."""
        return self.plan.predicted.microbatches or MICROBATCHES

    @cached_property
    def policy(self) -> Policy:
        return policy(
            PipelineSpec(
                self.plan.schedule,
                self.plan.replicas,
                microbatches=self.microbatches,
                max_in_flight=self.plan.max_in_flight,
            )
        )

    @cached_property
    def workload(self) -> Workload:
        return Workload.of(self.plan, self.policy, self.graph, UPDATE_RATE)

    @cached_property
    def predicted_seconds(self) -> float:
        """Per minibatch, as pd-optimize simulates it; by the cost model if it does not."""
        simulation = simulate_plan(self.plan, self.graph)
        if simulation is None:
            return self.plan.predicted.seconds_shared_out
        return simulation.seconds_per_minibatch

    @cached_property
    def span(self) -> SteadySpan:
        """As much of the steady state as there is time for: a single minibatch that is early or
        late makes a short one wrong.
        """
        least = SteadySpan.for_simulation(self.policy)
        first, drains = least.first, self.policy.drains
        step, rest = (first, 0) if drains else (first // 2, first // 2)
        spans = [
            SteadySpan(first + count * step + rest, first, first + count * step)
            for count in range(MOST_STEPS, 0, -1)
        ]
        spans.append(SteadySpan(3 * step, step, 2 * step))
        if drains:
            spans[-1] = SteadySpan(2 * self.microbatches, self.microbatches, 2 * self.microbatches)
        most = self.seconds / self.predicted_seconds
        return next((span for span in spans if span.minibatches <= most), spans[-1])

    def simulate(self) -> Simulation:
        """The run of this span, as the simulator has it."""
        links = tuple(sorted(self.workload.forward_bytes))
        schedule = Schedule(replace(self.policy.spec, links=links), self.span.minibatches)
        ranks = [stage.ranks for stage in self.plan.stages]
        return simulate(schedule, self.workload, self.plan.cluster, ranks, self.span)
