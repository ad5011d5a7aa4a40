"""Runs for `--calibrate`: from their measurements to a graph with corrected times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from pipedream.graph.errors import UserError
from pipedream.graph.measured_run import MEASURED, MeasuredRank, MeasuredRun, read_measured
from pipedream.graph.model import Graph, Node
from pipedream.graph.plan import Stage
from pipedream.graph.profile import Profile, Quartiles, TrainingOverheads
from pipedream.optimizer.calibrate.correction import Observation, calibrate
from pipedream.optimizer.cuts.planning_graph import Floats
from pipedream.schedule.schedule import ORDERS

FEWEST = 10
"""Fewer minibatches on a rank give no reliable median."""

_FEWEST_BYTES = 16e6
"""Of gaps that are planned: with fewer, what libraries take would be taken for them."""

_RUN_TO_RUN = 0.01
"""Relative difference of a stage's time between runs, however many minibatches they have."""


@dataclass(frozen=True)
class DividedWork:
    """What the devices of a stage on a mesh do of its nodes, by node and whether backward:
    `shares`, of the node's seconds; `messages` within the stage, in seconds of a pass.
    """

    shares: Mapping[tuple[str, bool], float]
    messages: Mapping[tuple[str, bool], float]

    def seconds(self, nodes: Sequence[Node], backward: bool) -> float:
        """Of a pass of these nodes."""
        each = ((n.backward_seconds if backward else n.forward_seconds, n.id) for n in nodes)
        worked = math.fsum(taken * self.shares[name, backward] for taken, name in each)
        return worked + self.waited(nodes, backward)

    def waited(self, nodes: Sequence[Node], backward: bool) -> float:
        """Of that, for messages."""
        return math.fsum(self.messages[node.id, backward] for node in nodes)


@dataclass(frozen=True)
class CalibrationRun:
    """A run in its `folder`, as the user named it."""

    folder: Path
    measured: MeasuredRun

    @staticmethod
    def read(folder: Path) -> CalibrationRun:
        """Reads a run's folder. Raises UserError if it is missing or has no measurements."""
        path = folder / MEASURED
        if not folder.is_dir():
            raise UserError(f"--calibrate {folder}: no such folder: give the folder of a run")
        if not path.exists() and (folder / "metrics.jsonl").exists():
            raise UserError(
                f"--calibrate {folder}: has no {MEASURED}: pd-train writes it at the end of a"
                " run; continue the run with --resume"
            )
        if not path.exists():
            raise UserError(
                f"--calibrate {folder}: is not the folder of a run: there is no {MEASURED};"
                " give the folder that pd-train -o named"
            )
        return CalibrationRun(folder, read_measured(path))

    def check(self, graph: Graph, name: Path, path: Path, profile: Profile | None) -> None:
        """Raises UserError unless the run is of `graph`, read from `name`, with its `profile` from
        `path`, and has measured enough.
        """
        said, plan = f"--calibrate {self.folder}", self.measured.plan
        ids = {node.id for node in plan.graph.nodes}
        if plan.graph.fingerprint != graph.fingerprint or ids != graph.nodes.keys():
            raise UserError(
                f"{said}: trained another graph than {name}: give the graph.txt that its plan was"
                " made from"
            )
        batch_size = self.measured.batch_size
        if profile is not None and profile.batch_size != batch_size:
            raise UserError(
                f"{said}: trained on minibatches of {batch_size}, and {path} was measured with"
                f" {profile.batch_size}: run pd-profile with --batch-size {batch_size}"
            )
        device = self.measured.device
        if profile is not None and profile.machine.device.partition(":")[0] != device:
            raise UserError(
                f"{said}: trained with --device {device}, and {path} was measured with --device"
                f" {profile.machine.device}: run pd-profile with --device {device}"
            )
        if plan.order not in (None, *ORDERS):
            raise UserError(f"{said}: order {plan.order!r} is not known: {', '.join(ORDERS)}")
        for rank in self.measured.ranks:
            if rank.minibatches < FEWEST:
                raise UserError(
                    f"{said}: {rank.minibatches} minibatches were measured on rank {rank.rank},"
                    f" at least {FEWEST} are needed: use more examples or a larger --save-every"
                )

    @property
    def update_rate(self) -> float | None:
        """Bytes of parameters that the optimizer updated per second; None without updates."""
        stages = self.measured.plan.stages
        steps = [(rank, rank.update) for rank in self.measured.ranks if rank.update is not None]
        seconds = sum(update.median * self._speed(rank) for rank, update in steps)
        updated_bytes = sum(stages[rank.stage].parameter_bytes for rank, _ in steps)
        return (updated_bytes / seconds if seconds else 0.0) or None

    @property
    def gaps(self) -> float | None:
        """Returns how much the allocator took of a CPU's memory in all ranks, relative to what was
        planned. None on other devices, for a run that was not as planned or with ranks of several
        stages, and if nothing was planned.
        """
        run, stages = self.measured, self.measured.plan.stages
        if run.device != "cpu" or len(run.ranks) != run.plan.workers:
            return None
        known = [
            (rank.peak_memory_bytes, memory)
            for rank in run.ranks
            if (memory := stages[rank.stage].memory) and rank.peak_memory_bytes is not None
        ]
        planned = sum(memory.allocator for _, memory in known)
        taken = sum(peak - memory.tensors for peak, memory in known)
        return max(0.0, taken / planned) if planned > _FEWEST_BYTES else None

    def passes(
        self,
        stage: int,
        overheads: TrainingOverheads | None = None,
        profiled: Graph | None = None,
    ) -> tuple[Sequence[Quartiles], Sequence[Quartiles]]:
        """Forward and backward seconds of each replica, scaled to the profiled device.

        Recomputed forward passes are subtracted from backward passes, and `overheads` from both. Of
        single nodes that are recomputed, as large a share of the forward pass as `profiled` says.
        """
        stages = self.measured.plan.stages
        overhead = (overheads or TrainingOverheads({})).of_stage(stage, len(stages))
        again = _recomputed_share(stages[stage], profiled)
        forward, backward = [], []
        for rank in self.measured.of_stage(stage):
            speed, second = self._speed(rank), again * rank.forward.median
            forward.append(_moved(rank.forward, -overhead[0] / speed, speed))
            backward.append(_moved(rank.backward, -second - overhead[1] / speed, speed))
        return forward, backward

    def _speed(self, rank: MeasuredRank) -> float:
        plan = self.measured.plan
        return plan.cluster.device(plan.stages[rank.stage].ranks[rank.replica]).speed


def _recomputed_share(stage: Stage, profiled: Graph | None) -> float:
    """Returns the share of a stage's forward pass that runs again."""
    if isinstance(stage.recompute, bool) or profiled is None:
        return float(stage.recomputes_all)
    nodes = [profiled.nodes[name] for name in stage.nodes]
    whole = math.fsum(node.forward_seconds for node in nodes)
    again = math.fsum(profiled.nodes[name].forward_seconds for name in stage.recompute)
    return again / whole if whole else 0.0


def _moved(spread: Quartiles, by: float, times: float) -> Quartiles:
    """Shifts and scales; at least a tenth remains, as nothing can be learned from a time of 0."""
    return Quartiles(
        **{name: max(0.1 * x, x + by) * times for name, x in spread.model_dump().items()}
    )


def calibrated(
    graph: Graph,
    runs: Sequence[CalibrationRun],
    profile: Profile | None,
    overheads: TrainingOverheads | None = None,
    works: Sequence[DividedWork | None] | None = None,
) -> Graph:
    """The graph with corrected times of its nodes, forward and backward independently. `works`: of
    each run, what its meshes shared [default: none had any]; what their messages should have taken
    is no node's time.
    """
    position = {name: index for index, name in enumerate(graph.nodes)}
    stages = [
        (
            run,
            work,
            stage.stage,
            [graph.nodes[n] for n in stage.nodes if not graph.nodes[n].is_input],
        )
        for run, work in zip(runs, works or [None] * len(runs), strict=True)
        for stage in run.measured.plan.stages
    ]

    def corrected(direction: int, of_node: Callable[[Any], Any]) -> Floats:
        observations = []
        for run, work, stage, nodes in stages:
            numbers = tuple(position[node.id] for node in nodes)
            counted = min(rank.minibatches for rank in run.measured.of_stage(stage))
            replicas = run.passes(stage, overheads, graph)[direction]
            observation = _observation(numbers, replicas, counted)
            if work is not None:
                shares = tuple(work.shares[node.id, bool(direction)] for node in nodes)
                taken = observation.seconds - work.waited(nodes, bool(direction))
                observation = replace(
                    observation, seconds=max(0.1 * observation.seconds, taken), shares=shares
                )
            observations.append(observation)
        measured = profile and [of_node(profile.node[name]).spread for name in graph.nodes]
        spreads = np.array(measured) if measured else None
        return calibrate(np.array(list(map(of_node, graph.nodes.values()))), observations, spreads)

    forward = corrected(0, attrgetter("forward_seconds"))
    backward = corrected(1, attrgetter("backward_seconds"))
    return graph.with_nodes(
        replace(node, forward_seconds=float(f), backward_seconds=float(b))
        for node, f, b in zip(graph.nodes.values(), forward, backward, strict=True)
    )


def _observation(
    nodes: tuple[int, ...], replicas: Sequence[Quartiles], counted: int
) -> Observation:
    """Returns the mean of the replicas; its error is that between runs and that of a median."""
    seconds = math.fsum(spread.median for spread in replicas) / len(replicas)
    apart = max(spread.upper - spread.lower for spread in replicas)
    return Observation(nodes, seconds, math.hypot(_RUN_TO_RUN * seconds, apart / counted**0.5))
