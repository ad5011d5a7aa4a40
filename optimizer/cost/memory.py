"""The memory of one worker: the one account that planner, simulator, plan.json and report share.

A worker holds most during the backward pass of its oldest minibatch in flight: what that minibatch
saved is freed node by node from the last to the first, while parameter gradients are produced.
`graph.plan.StageMemory` lists the items at that moment; `HeldBytes` says how they change over time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipedream.graph.choices import MICROBATCHES, Correction, OptimizerName, ScheduleName
from pipedream.graph.plan import StageMemory
from pipedream.optimizer.cost.recomputation import (
    OFFLOADED_SETS,
    Offloaded,
    RecomputationClasses,
    Recomputed,
)
from pipedream.optimizer.cuts.downsets import Cuts, States
from pipedream.optimizer.cuts.planning_graph import Floats, Ints, PlanningGraph
from pipedream.schedule.policy import Peak, Policy, policy, uniform_updates
from pipedream.schedule.spec import PipelineSpec

STATES: dict[OptimizerName, int] = {"sgd": 0, "momentum": 1, "adam": 2, "muon": 2}
"""Tensors per parameter in the optimizer's state; of muon at most: see `Node.state_bytes`."""

MOMENTS = 24
"""Moments of the backward pass that are examined; neighbouring nodes share one in larger graphs."""

ROOM_ON_GPU = 2e9
"""Bytes of a GPU that are not the model's: the context with all kernels loaded, buffers of a few
communicators of NCCL, and gaps among tensors in torch's allocator."""

READ_AHEAD = 2
"""Minibatches that pd-train reads ahead on a CPU, beside the one that is on its way."""

_FEW_CUTS = 100
"""With no more than these, as those of one plan, a product of matrices is faster."""


@dataclass(frozen=True)
class TrainingSettings:
    """What determines a worker's memory besides the model.

    `microbatches` make one update, for schedules that make one per several minibatches.
    `corrections`: with `weight_prediction` (weight stashing only) the older versions of a stage
    that is not the last are replaced by predicted weights, one copy per minibatch in flight, and
    the last step of the optimizer is kept, one more tensor per parameter. With `error_feedback` a
    stage keeps the steps that are to be made good, as many as the updates that its gradients are
    late, which is as many as there are older versions. With `basis_rotation` it keeps bases, of
    which the footprints know. `gaps`, of nodes by name: what the allocator adds to the bytes of one
    minibatch, and of further ones in flight, relative to these; `read_ahead`: minibatches that are
    read before they are asked for. `programs`: a backward pass computes gradients of weights last,
    and so makes again at once what single nodes do.
    """

    schedule: ScheduleName = "weight-stashing"
    optimizer: OptimizerName = "sgd"
    microbatches: int = MICROBATCHES
    corrections: frozenset[Correction] = frozenset()
    gaps: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    read_ahead: int = 0
    programs: bool = False

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


class Replicas(NamedTuple):
    """How many replicas stages have, and among how many of them the optimizer's state is divided:
    for each of several stages, or the same for all.
    """

    number: int = 1
    parts: int | Ints = 1


ALONE = Replicas()

_Varying: TypeAlias = tuple[Floats, Floats, Floats]


class _Copies(NamedTuple):
    """How often a worker holds the parameters once more, as older versions, as steps of theirs and
    as buckets in which replicas add gradients up; which part it holds of the optimizer's state; and
    what a minibatch saves and receives, besides what a backward pass holds.
    """

    older: int
    steps: Floats | float
    state: Floats | float
    buckets: int
    saved: int
    received: int


class MemoryModel:
    """The memory of every stage between two cuts, on one worker.

    Work and memory: a few times `MOMENTS` times the number of cuts for each start.
    """

    def __init__(self, cuts: Cuts, settings: TrainingSettings) -> None:
        self.cuts = cuts
        self.settings = settings
        graph = cuts.graph
        self._moment = moment = _moments(graph)
        self._saved = np.cumsum(self._by_moment(moment, graph.saved_bytes), axis=0)
        self._parameters = np.cumsum(self._by_moment(moment, graph.parameter_bytes), axis=0)
        self._nodes = self._by_moment(moment, np.ones(len(graph)))
        self._workspace = np.zeros(len(self._nodes))
        np.maximum.at(self._workspace, moment, graph.workspace_bytes)
        self._rotates = "basis_rotation" in settings.corrections
        self._finding = np.zeros(len(self._nodes))
        if self._rotates:
            np.maximum.at(self._finding, moment, graph.basis_workspace_bytes)
        self._last: tuple[int, tuple[Floats, ...]] = (-1, ())
        self._last_of_class: dict[int, tuple[int, tuple[Floats, Floats]]] = {}

    @cached_property
    def _gaps(self) -> tuple[Floats, Floats, Floats]:
        """[state]: bytes that the nodes before the cut save and learn, and gaps between them, of
        the oldest minibatch and of further ones.
        """
        graph, gaps = self.cuts.graph, self.settings.gaps
        bytes_of = graph.saved_bytes + graph.parameter_bytes
        shares = np.array([gaps.get(name, (0.0, 0.0)) for name in graph.names]).reshape(-1, 2).T
        first, further = (self.cuts.sum(bytes_of * share) for share in shares)
        return self.cuts.sum(bytes_of), first, further

    def _shares(self, start: int, ends: States) -> tuple[Floats, Floats]:
        """[end]: what the allocator adds to the bytes of the oldest minibatch, and to those of
        further ones, relative to these: the mean of the nodes, by their bytes.
        """
        sizes, first, further = (each[ends] - each[start] for each in self._gaps)
        some = np.where(sizes > 0, sizes, np.inf)
        return np.asarray(first / some), np.asarray(further / some)

    def _by_moment(self, moment: NDArray[np.intp], values: Floats) -> Floats:
        """[moment, state]: the sum over the moment's nodes before the cut."""
        if len(self.cuts) <= _FEW_CUTS:
            table = np.zeros((max(moment) + 1, len(values)))
            table[moment, np.arange(len(values))] = values
            return np.asarray(table @ self.cuts.holds.astype(np.float64))
        moments = range(max(moment) + 1)
        return np.array([self.cuts.sum(np.where(moment == m, values, 0.0)) for m in moments])

    def total(
        self, start: int, ends: States, peak: Peak, recompute: bool, replicas: Replicas = ALONE
    ) -> Floats:
        """Bytes of the stages from `start` to each of `ends`, with `peak` in flight."""
        if self._last[0] != start:  # a search asks for one start many times in a row
            every = slice(None)
            varying = np.asarray(sum(self._varying_parts(start, every))).max(axis=0)
            first, further = self._shares(start, every)
            self._last = start, (*self._amounts(start, every), 1 + further, (1 + first) * varying)
        parameters, state, saved, received, sent, further, varying = self._last[1]
        copies = self._copies(peak, recompute, replicas)
        passing = copies.saved * saved[ends] + copies.received * received[ends] + sent[ends]
        return np.asarray(
            (1 + copies.older + copies.steps + copies.buckets) * parameters[ends]
            + copies.state * state[ends]
            + self._bases(start, ends)
            + further[ends] * passing
            + varying[ends]
        )

    @cached_property
    def classes(self) -> RecomputationClasses:
        """Of nodes that stages may recompute one by one."""
        return RecomputationClasses(self.cuts)

    @cached_property
    def _saved_by_classes(self) -> list[Floats]:
        """[moment, state] of each class: what its nodes save, and those of cheaper ones."""
        saved = self.classes.nodes.saved_bytes
        return [
            np.cumsum(self._by_moment(self._moment, members * saved), axis=0)
            for members in self.classes.members
        ]

    def without_classes(
        self, start: int, ends: States, peak: Peak, number: int, replicas: Replicas = ALONE
    ) -> Floats:
        """As `total`, if the nodes of classes 0 to `number` are recomputed one by one. Not less
        than what is needed.
        """
        known = self._last_of_class.get(number)
        if known is None or known[0] != start:
            every = slice(None)
            table = self._saved_by_classes[number]
            freed = table - table[:, start, None]
            saved, *others = self._varying_parts(start, every)
            most = math.inf if self.settings.programs else self.classes.made_again[number]
            again = np.minimum(most, freed)
            saved[:-1] += again - freed
            varying = np.asarray(sum((saved, *others))).max(axis=0)
            first, further = self._shares(start, every)
            varying *= 1 + first
            fixed = self._last[1][-1] if self._last[0] == start else None
            assert fixed is not None, "total comes first"
            known = start, ((1 + further) * freed[-1], fixed - varying)
            self._last_of_class[number] = known
        freed, less = known[1]
        plain = self.total(start, ends, peak, False, replicas)
        return np.asarray(plain - (peak.in_flight - 1) * freed[ends] - less[ends])

    def of(
        self, start: int, end: int, peak: Peak, recompute: Recomputed, replicas: Replicas = ALONE
    ) -> StageMemory:
        """The items of one stage.

        Gradients last from a backward pass to its update; with schedules that make one update per
        several minibatches, for the whole round. Each minibatch in flight keeps what the stage
        received for it; one more is on its way, and so is a gradient. A minibatch also keeps what
        its nodes saved, with `recompute` only during its backward pass.
        """
        ends = slice(end, end + 1)
        parameters, state, saved, received, sent = self._amounts(start, ends)
        copies = self._copies(peak, recompute is True, replicas)
        if isinstance(recompute, Offloaded):
            copies = copies._replace(saved=min(copies.saved, OFFLOADED_SETS - 1))
            recompute = False
        varying, again = self._varying_parts(start, ends), np.zeros(0)
        if recompute:
            varying, again = self._with_recomputed(start, end, recompute, varying)
            saved = saved - self._freed(recompute)
        at = np.asarray(sum(varying)).argmax(axis=0)[None]
        oldest, gradients, workspace = (np.take_along_axis(part, at, axis=0)[0] for part in varying)
        made = again[at[0]] if recompute else np.zeros(1)
        activations = copies.saved * saved + oldest
        inputs = copies.received * received + sent
        first, further = self._shares(start, ends)
        waiting = copies.saved * saved + inputs
        items = {
            "parameters": parameters,
            "weight_versions": copies.older * parameters,
            "optimizer_state": copies.state * state
            + copies.steps * parameters
            + self._bases(start, ends),
            "gradients": gradients,
            "buckets": copies.buckets * parameters,
            "activations": np.maximum(activations - made, 0.0),  # where all is made again
            "recomputed": made,
            "inputs": inputs,
            "workspace": workspace,
            "allocator": first * (oldest + gradients + workspace) + further * waiting,
        }
        return StageMemory(**{name: float(amount[0]) for name, amount in items.items()})

    def offloaded(self, start: int, ends: States, peak: Peak, replicas: Replicas = ALONE) -> Floats:
        """As `total`, if what is saved is moved to the host."""
        saved = self._saved[-1, ends] - self._saved[-1, start]
        moved = max(0, peak.in_flight - OFFLOADED_SETS) * saved
        return np.asarray(
            self.total(start, ends, peak, False, replicas)
            - (1 + self._shares(start, ends)[1]) * moved
        )

    def copy_seconds(self, start: int, ends: States, bandwidth: float) -> Floats:
        """Seconds to move what a minibatch saves, at so many bytes per second."""
        return np.asarray((self._saved[-1, ends] - self._saved[-1, start]) / bandwidth)

    @cached_property
    def compute_seconds(self) -> Floats:
        """[state]: forward and backward of the nodes before the cut."""
        return self.cuts.sum(self.cuts.graph.compute_seconds)

    def _freed(self, recompute: bool | tuple[int, ...]) -> float:
        """Bytes that a minibatch in flight does not keep, where single nodes are recomputed."""
        nodes = [] if isinstance(recompute, bool) else list(recompute)
        return float(self.classes.nodes.saved_bytes[nodes].sum()) if nodes else 0.0

    def _with_recomputed(
        self, start: int, end: int, recompute: bool | tuple[int, ...], varying: _Varying
    ) -> tuple[_Varying, Floats]:
        """`_varying_parts` of one stage that recomputes, and of those [moment] what has been made
        again. A stage that does so as a whole makes all of it at once.
        """
        saved, gradients, workspace = varying
        if isinstance(recompute, bool):
            return varying, saved[:, 0]
        inside = self.cuts.nodes(start, end)
        moments, last = self._moment, len(saved) - 1
        freed = np.zeros(last)
        np.add.at(freed, moments[list(recompute)], self.classes.nodes.saved_bytes[list(recompute)])
        made = freed = np.append(np.cumsum(freed), 0.0)
        if not self.settings.programs:
            made = np.zeros(last)
            again = self.classes.nodes.made_again(inside, recompute)
            np.maximum.at(made, moments[list(inside)], again)
            made = np.minimum(np.append(made, 0.0), freed)
        return ((saved[:, 0] - freed + made)[:, None], gradients, workspace), made

    @cached_property
    def _state(self) -> Floats | None:
        """[state of the cuts]: what the optimizer keeps for the nodes before the cut, if that is
        known of each.
        """
        known = self.cuts.graph.state_bytes
        return None if known is None else self.cuts.sum(known)

    def _amounts(self, start: int, ends: States) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """Bytes of parameters, of the optimizer's state, of what a minibatch saves and receives,
        and of what is sent and read ahead, once.
        """
        own = self._parameters[-1, ends] - self._parameters[-1, start]
        copied, each = self.cuts.copied_bytes(start)[ends], STATES[self.settings.optimizer]
        known = each * own if self._state is None else self._state[ends] - self._state[start]
        ahead = self.cuts.bytes_input(start)[ends]
        return (
            own + copied,
            known + each * copied,
            self._saved[-1, ends] - self._saved[-1, start],
            self.cuts.bytes_received(start)[ends],
            self.cuts.bytes_across[ends] + self.settings.read_ahead * ahead,
        )

    @cached_property
    def _all_bases(self) -> Floats | None:
        """[state]: bytes of the bases of the nodes before the cut; None if there are none."""
        return self.cuts.sum(self.cuts.graph.basis_bytes) if self._rotates else None

    def _bases(self, start: int, ends: States) -> Floats | float:
        known = self._all_bases
        return 0.0 if known is None else np.asarray(known[ends] - known[start])

    def _copies(self, peak: Peak, recompute: bool, replicas: Replicas) -> _Copies:
        corrections = self.settings.corrections
        predicting = "weight_prediction" in corrections and peak.in_flight > 1
        kept = peak.versions - 1 if "error_feedback" in corrections else 0
        return _Copies(
            older=peak.in_flight if predicting else peak.versions - 1,
            steps=kept / replicas.parts + predicting,
            state=1 / replicas.parts,
            buckets=int(replicas.number > 1),
            saved=0 if recompute else peak.in_flight - 1,
            received=peak.in_flight + 1,
        )

    def _varying_parts(self, start: int, ends: States) -> _Varying:
        """[moment, end]: what changes during the backward pass: saved by the oldest minibatch,
        gradients, workspace; the last moment is the update.
        """
        columns = self._saved[:, ends].shape[1]
        last = np.zeros((1, columns))
        saved = self._saved[:, ends] - self._saved[:, start, None]
        before = self._parameters[:, ends] - self._parameters[:, start, None]
        before = before + self.cuts.copied_bytes(start)[ends]
        whole = before[-1:]
        whole_round = uniform_updates(self.settings.schedule)
        gradients = 0 * before + whole if whole_round else whole - before
        busy = self._nodes[:, ends] > self._nodes[:, start, None]
        workspace = np.where(busy, self._workspace[:, None], 0.0)
        update = np.where(busy, self._finding[:, None], 0.0).max(axis=0)[None]
        if self._rotates:  # gaps were measured in passes, and are no share of this
            update /= 1 + self._shares(start, ends)[0]
        return (
            np.concatenate([saved, last]),
            np.concatenate([gradients, whole]),
            np.concatenate([workspace, update]),
        )


def _moments(graph: PlanningGraph) -> NDArray[np.intp]:
    """The moment of each node: its own, or one shared with neighbours in larger graphs."""
    if len(graph) <= MOMENTS:
        return np.arange(len(graph))
    weight = np.cumsum(graph.saved_bytes + graph.parameter_bytes + 1.0)
    moment = np.minimum(weight / weight[-1] * MOMENTS, MOMENTS - 1).astype(np.intp)
    return np.asarray(np.unique(moment, return_inverse=True)[1])


@dataclass(frozen=True)
class HeldBytes:
    """`StageMemory` taken apart by time: bytes held always, per older weight version, per minibatch
    in flight, during a backward pass, and from there to the update; and per minibatch between the
    halves of its backward pass, if it is divided [default: as much as in flight].
    """

    always: float = 0.0
    version: float = 0.0
    minibatch: float = 0.0
    backward: float = 0.0
    gradients: float = 0.0
    halfway: float | None = None

    @staticmethod
    def of(memory: StageMemory | None, peak: Peak, kept: float = math.nan) -> HeldBytes:
        """Splits the memory at the peak, with `peak` in flight; all zero if it is not known.

        `kept`: what the stage's nodes make and need after the gradients of their inputs, if that is
        known. What the stage received is assumed to be needed, too.
        """
        if memory is None:
            return HeldBytes()
        return HeldBytes(
            always=memory.weights - memory.weight_versions + memory.allocator,
            version=memory.weight_versions / max(1, peak.versions - 1),
            minibatch=(memory.inputs + memory.activations) / peak.in_flight,
            backward=memory.workspace + memory.gradients + memory.recomputed,
            gradients=memory.parameters,
            halfway=None if math.isnan(kept) else kept + memory.inputs / peak.in_flight,
        )

    def at(
        self, older_versions: int, in_flight: int, backward: bool, gradients: bool, halfway: int = 0
    ) -> float:
        """Bytes held at one moment: in a `backward` pass, or with `gradients` not yet used.

        `halfway`: of the minibatches in flight, those whose backward pass is half done.
        """
        amount = self.always + older_versions * self.version + in_flight * self.minibatch
        if self.halfway is not None:
            amount += halfway * (self.halfway - self.minibatch)
        if backward:
            return amount + self.backward
        return amount + self.gradients if gradients else amount
