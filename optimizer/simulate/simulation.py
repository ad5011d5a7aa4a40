"""The result of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipedream.graph.plan import Plan, Simulated
from pipedream.graph.timeline import Event


@dataclass(frozen=True)
class Simulation:
    """How a schedule went.

    `seconds_per_minibatch` and `bubble`, the share of the workers' time in which they neither
    compute nor update, are of the steady state, which begins with minibatch `steady_from`.
    `events` and `memory` are by rank; memory is a list of (second, bytes held from then on).
    """

    seconds_per_minibatch: float
    bubble: float
    steady_from: int
    events: Mapping[int, Sequence[Event]]
    memory: Mapping[int, Sequence[tuple[float, float]]]

    def noted_in(self, plan: Plan) -> Plan:
        """The plan with the figures of its simulation."""
        figures = Simulated(seconds_per_minibatch=self.seconds_per_minibatch, bubble=self.bubble)
        predicted = plan.predicted.model_copy(update={"simulated": figures})
        return plan.model_copy(update={"predicted": predicted})
