"""What one worker of a stage has to hold, at the moment when it holds most.

That moment is in the backward pass of the oldest minibatch in flight: what it saved goes, node by
node from the last to the first, while the gradients of the parameters come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from pipedream.graph.choices import MICROBATCHES, OptimizerName, ScheduleName
from pipedream.optimizer.cuts.downsets import Cuts, States
from pipedream.optimizer.cuts.planning_graph import Floats, PlanningGraph
from pipedream.schedule.policy import Peak, Policy, policy, same_everywhere
from pipedream.schedule.spec import PipelineSpec

STATES: dict[OptimizerName, int] = {"sgd": 0, "momentum": 1, "adam": 2}
"""Tensors of the size of a parameter that the optimizer remembers."""

MOMENTS = 24
"""Moments of the backward pass that are looked at in a graph of more nodes than that."""


@dataclass(frozen=True)
class TrainingSettings:
    """What decides, beside the model, how much a worker holds.

    `microbatches` make one update where the schedule makes one for several minibatches. With
    `weight_prediction` (pipedream.runtime.engine.prediction; weight stashing alone) the older
    versions of a stage with later ones behind it give way to predicted weights, a copy for each
    minibatch in flight, and its last step is one more tensor for each parameter.
    """

    schedule: ScheduleName = "weight-stashing"
    optimizer: OptimizerName = "sgd"
    microbatches: int = MICROBATCHES
    weight_prediction: bool = False

    def policy(self, replicas: Sequence[int], max_in_flight: Sequence[int] | None = None) -> Policy:
        most = None if max_in_flight is None else tuple(max_in_flight)
        return policy(PipelineSpec(self.schedule, tuple(replicas), (), self.microbatches, 1, most))

    def peak(self, downstream_workers: int) -> Peak:
        """A lower bound on what a stage holds, given the workers of later stages per worker.

        Exact except that gpipe has fewer in flight on each of several replicas, and vertical sync
        keeps more versions in all stages but the first.
        """
        replicas = (1, downstream_workers) if downstream_workers else (1,)
        in_flight = (1 + downstream_workers, 1)[: len(replicas)]
        return self.policy(replicas, in_flight).peak(0)


@dataclass(frozen=True)
class Memory:
    """Bytes on one worker at that moment; `graph.plan.StageMemory` says what each of them is."""

    parameters: Floats
    weight_versions: Floats
    optimizer_state: Floats
    gradients: Floats
    activations: Floats
    inputs: Floats
    workspace: Floats

    @property
    def total(self) -> Floats:
        return np.asarray(sum(astuple(self)))


class StageMemory:
    """The memory of any stage between two cuts.

    Work and memory: a few times `MOMENTS` times the number of cuts for each start.
    """

    def __init__(self, cuts: Cuts, settings: TrainingSettings) -> None:
        self.cuts = cuts
        self.settings = settings
        graph = cuts.graph
        moment = _moments(graph)
        self._saved = np.cumsum(self._by_moment(moment, graph.saved_bytes), axis=0)
        self._made = np.cumsum(self._by_moment(moment, graph.parameter_bytes), axis=0)
        self._count = self._by_moment(moment, np.ones(len(graph)))
        self._needs = np.zeros(len(self._count))
        np.maximum.at(self._needs, moment, graph.workspace_bytes)
        self._last: tuple[int, Floats] = (-1, np.empty(0))

    def _by_moment(self, moment: NDArray[np.intp], values: Floats) -> Floats:
        """[moment, state]: the sum over the nodes before the cut that belong to the moment."""
        found = [self.cuts.sum(np.where(moment == m, values, 0.0)) for m in range(max(moment) + 1)]
        return np.array(found)

    def total(self, start: int, ends: States, peak: Peak, recompute: bool) -> Floats:
        """Bytes of the stages from `start` to each of `ends`, with `peak` in flight."""
        if self._last[0] != start:  # a search asks many times in a row
            self._last = start, self._passing(start, slice(None)).max(axis=0)
        steady = self._steady(start, ends, peak, recompute)
        return np.asarray(sum(steady.values())) + self._last[1][ends]

    def of(self, start: int, ends: States, peak: Peak, recompute: bool) -> Memory:
        """Likewise, item by item.

        Gradients last from a backward pass to its update; with a schedule that makes one update for
        several minibatches, for all of the round. Each minibatch in flight keeps what the stage has
        received for it, one more is on its way, and so is a gradient; and it keeps what the nodes
        saved: with `recompute` only while its backward pass lasts.
        """
        held = self._steady(start, ends, peak, recompute)
        at = self._passing(start, ends).argmax(axis=0)[None]
        parts = self._parts(start, ends)
        saved, made, needed = (np.take_along_axis(part, at, axis=0)[0] for part in parts)
        return Memory(
            **held | {"activations": held["activations"] + saved, "workspace": needed},
            gradients=made,
        )

    def _steady(self, start: int, ends: States, peak: Peak, recompute: bool) -> dict[str, Floats]:
        """What does not change in the course of the backward pass."""
        parameters = self._made[-1, ends] - self._made[-1, start]
        saved = self._saved[-1, ends] - self._saved[-1, start]
        received = self.cuts.bytes_read(start)[ends] + self.cuts.model_input_bytes(start)[ends]
        others = peak.in_flight - 1
        predicting = self.settings.weight_prediction and peak.in_flight > 1
        older = peak.in_flight if predicting else peak.versions - 1
        return {
            "parameters": parameters,
            "weight_versions": older * parameters,
            "optimizer_state": (STATES[self.settings.optimizer] + predicting) * parameters,
            "activations": 0 * saved if recompute else others * saved,
            "inputs": (peak.in_flight + 1) * received + self.cuts.bytes_across[ends],
            "workspace": 0 * saved,
        }

    def _passing(self, start: int, ends: States) -> Floats:
        """[moment, end]: what does change; the last moment is that of the update."""
        return np.asarray(sum(self._parts(start, ends)))

    def _parts(self, start: int, ends: States) -> tuple[Floats, Floats, Floats]:
        """[moment, end]: saved by the oldest minibatch, gradients, workspace."""
        columns = self._saved[:, ends].shape[1]
        last = np.zeros((1, columns))
        saved = self._saved[:, ends] - self._saved[:, start, None]
        made = self._made[:, ends] - self._made[:, start, None]
        all_made = made[-1:]
        all_the_time = same_everywhere(self.settings.schedule)
        made = 0 * made + all_made if all_the_time else all_made - made
        busy = self._count[:, ends] > self._count[:, start, None]
        needed = np.where(busy, self._needs[:, None], 0.0)
        return (
            np.concatenate([saved, last]),
            np.concatenate([made, all_made]),
            np.concatenate([needed, last]),
        )


def _moments(graph: PlanningGraph) -> NDArray[np.intp]:
    """The moment of each node: its own, or one shared with neighbours where nodes are many."""
    if len(graph) <= MOMENTS:
        return np.arange(len(graph))
    weight = np.cumsum(graph.saved_bytes + graph.parameter_bytes + 1.0)
    found: NDArray[np.intp] = np.minimum(weight / weight[-1] * MOMENTS, MOMENTS - 1).astype(np.intp)
    return np.unique(found, return_inverse=True)[1]
