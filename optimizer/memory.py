"""What one worker of a stage has to hold."""

from __future__ import annotations

from dataclasses import dataclass

from pipedream.graph.plan import ScheduleName
from pipedream.optimizer.cuts import Cuts, States
from pipedream.optimizer.planning import Floats
from pipedream.runtime.schedule import warm_up


@dataclass(frozen=True)
class Memory:
    """Bytes on one worker: the weight versions and the gradients; the stashed activations."""

    parameters: Floats
    stash: Floats

    @property
    def total(self) -> Floats:
        return self.parameters + self.stash


def in_flight(load: int) -> int:
    """Minibatches in flight at a stage with `load` workers of later stages for each of its own."""
    return warm_up((1, load), 0)


def stage_memory(
    cuts: Cuts, schedule: ScheduleName, start: int, ends: States, minibatches: int
) -> Memory:
    """For the stages from `start` to each of `ends`, with `minibatches` in flight.

    Weight stashing keeps one weight version for each minibatch in flight, flush keeps one; either
    accumulates one set of gradients. Each minibatch in flight stashes the outputs of the stage's
    nodes and the tensors it has received.
    """
    parameters = cuts.parameter_bytes[ends] - cuts.parameter_bytes[start]
    outputs = cuts.activation_bytes[ends] - cuts.activation_bytes[start]
    versions = minibatches if schedule == "weight-stashing" else 1
    stash = minibatches * (outputs + cuts.bytes_read(start)[ends])
    return Memory(parameters=(versions + 1) * parameters, stash=stash)
