"""Tries divisions in an order of `schedule.orders`, several stages on each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from pipedream.graph.choices import MICROBATCHES, Recompute, Zero
from pipedream.graph.plan import DraftPlan, LinkSeconds, OrderTimes, StageMemory
from pipedream.optimizer.choose.division import Division
from pipedream.optimizer.choose.trial import Trial, Trials
from pipedream.optimizer.cost.memory import MemoryModel, Replicas
from pipedream.optimizer.cost.network import Network
from pipedream.optimizer.cost.worker_memory import WorkerMemory
from pipedream.optimizer.cuts.antichains import bits
from pipedream.optimizer.search.placed_plan import unpriced_plan, with_workers
from pipedream.optimizer.search.request import Request
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.optimizer.simulate.simulator import QUICK_MOVES, simulate_work
from pipedream.optimizer.simulate.workload import Workload
from pipedream.schedule.orders.auto import has_room
from pipedream.schedule.orders.named import most_in_flight
from pipedream.schedule.policy import Peak, Policy, policy
from pipedream.schedule.spec import PipelineSpec, in_order_of

AUTO = "auto"


@dataclass(frozen=True)
class Shape:
    """Where the stages are: `places[stage]` is a place of the pipeline, `ranks` are those of each
    place, as many as the pipeline has replicas.
    """

    places: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def stages_each(self) -> int:
        return len(self.places) // len(self.ranks)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of each stage."""
        return tuple(map(len, self.of_stages))

    @property
    def of_stages(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage."""
        return tuple(self.ranks[place] for place in self.places)


@dataclass(frozen=True)
class OrderedTrial(Trial):
    """A trial of stages in this shape, of which a rank holds at most `rank_bytes`."""

    shape: Shape
    rank_bytes: float

    @property
    def order(self) -> str:
        assert self.plan.order is not None
        return self.plan.order


class OrderedTrials(Trials[OrderedTrial]):
    """All that has been tried in one order and shape; `spent`: the number of divisions."""

    def __init__(self, request: Request, order: str, shape: Shape) -> None:
        super().__init__(request)
        self.order, self.shape, self.types = order, shape, request.device_types

    def make(self, division: Division, within: float) -> OrderedTrial | None:
        """None also if no order has room. With --zero auto, and --recompute auto or whole, the
        first plan that fits: without, with one of them, with both. Stages recompute as a whole.
        """
        trial = None
        for recompute, zero in product(
            _ways(self.request.recompute), _ways(self.request.zero, max(division.replicas) > 1)
        ):
            if trial is None or not trial.fits:
                trial = self._make(division, recompute, zero) or trial
        self.known[division] = trial
        return trial

    def _make(self, division: Division, recompute: bool, zero: bool) -> OrderedTrial | None:
        self.plans += 1
        stages = _Stages(self.request, self.shape, division, recompute, zero)
        plan = stages.plan(self.order, [1] * len(self.shape.places))
        if self.order == AUTO:
            plan = plan.model_copy(update={"order_times": stages.order_times(plan)})
        spec = in_order_of(plan, _spec(plan))
        if not has_room(spec):
            return None
        workers = stages.workers(most_in_flight(spec))
        plan = with_workers(plan, workers)
        simulation = simulate_work(plan, self.request.workload(plan, policy_of(plan)), QUICK_MOVES)
        if simulation is None:
            return None
        held = _held(simulation)
        return OrderedTrial(
            division,
            simulation.noted_in(plan),
            simulation,
            self._fits(held),
            f"ranks wait {simulation.bubble:.0%} of the time",
            self.least(division),
            self.shape,
            max(held.values()),
        )

    def _fits(self, held: Mapping[int, float]) -> bool:
        return not self.types.memory_limited or all(
            amount <= self.types.worst_of_ranks([rank], self.request.cluster).memory
            for rank, amount in held.items()
        )

    def least(self, division: Division) -> float:
        """The work of the ranks that have most of it."""
        shape = self.shape
        compute, before = self.request.planning.compute_seconds, 0
        work = [0.0] * len(shape.ranks)
        for place, downset in zip(shape.places, division.downsets, strict=True):
            own = list(bits(downset & ~before))
            work[place] += float(compute[own].sum()) / len(shape.ranks[place])
            before = downset
        return max(work) / self.types.fastest


def _ways(asked: Recompute | Zero, possible: bool = True) -> tuple[bool, ...]:
    """Whether to do it, the first choice first."""
    if asked == "never" or not possible:
        return (False,)
    return (True,) if asked == "always" else (False, True)


def _spec(plan: DraftPlan) -> PipelineSpec:
    microbatches = plan.predicted.microbatches or MICROBATCHES
    return PipelineSpec(plan.schedule, plan.replicas, plan.links, microbatches)


def policy_of(plan: DraftPlan) -> Policy:
    """That of the plan's stages, in its order."""
    return policy(in_order_of(plan, _spec(plan)))


def _held(simulation: Simulation) -> dict[int, float]:
    """The most that each rank holds."""
    return {
        rank: max((held for _, held in over_time), default=0.0)
        for rank, over_time in simulation.memory.items()
    }


class _Stages:
    """The stages between the cuts of a division, on the ranks of a shape."""

    def __init__(
        self, request: Request, shape: Shape, division: Division, recompute: bool, zero: bool
    ) -> None:
        self.request, self.types = request, request.device_types
        self.network = Network(request.cluster)
        self.shape, self.recompute, self.zero = shape, recompute, zero
        self.cuts = division.cuts(self.request.planning)
        self.placed = division.placed(self.request.cluster)
        self.last = len(shape.places) - 1

    @cached_property
    def model(self) -> MemoryModel:
        return self.request.memory_model(self.cuts)

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """Of one minibatch in flight."""
        return self._memory([1] * (self.last + 1))

    def _memory(self, in_flight: Sequence[int]) -> tuple[StageMemory, ...]:
        numbers = [each.replicas for each in self.placed]
        return tuple(
            self.model.of(
                stage,
                stage + 1,
                Peak(count, 1),
                self.recompute and stage < self.last,
                Replicas(numbers[stage], numbers[stage] if self.zero else 1),
            )
            for stage, count in enumerate(in_flight)
        )

    def workers(self, in_flight: Sequence[int]) -> list[WorkerMemory]:
        return [
            WorkerMemory(
                Peak(count, 1),
                count,
                self.recompute and stage < self.last,
                memory,
                self.types.worst_of_machines(placed.machines),
                self.zero and placed.replicas > 1,
            )
            for stage, (count, memory, placed) in enumerate(
                zip(in_flight, self._memory(in_flight), self.placed, strict=True)
            )
        ]

    def plan(self, order: str, in_flight: Sequence[int]) -> DraftPlan:
        microbatches = self.request.settings.microbatches
        workers = self.workers(in_flight)
        plan = unpriced_plan(self.cuts, self.request, self.placed, workers, microbatches)
        return plan.model_copy(update={"order": order})

    def order_times(self, plan: DraftPlan) -> OrderTimes:
        """What the order is found for, on the slowest device of each place."""
        plain = plan.model_copy(update={"order": None})
        work = self.request.workload(plain, policy(_spec(plan)))
        speeds = [self.types.worst_of_machines(placed.machines).speed for placed in self.placed]
        stages = [each.at(speed) for each, speed in zip(work.stages, speeds, strict=True)]
        two = self._memory([2] * len(stages))
        held = [more.total - one.total for one, more in zip(self.memory, two, strict=True)]
        return OrderTimes(
            forward=tuple(each.forward_seconds for each in stages),
            backward_input=tuple(each.backward_input_seconds for each in stages),
            backward_weight=tuple(each.backward_weight_seconds for each in stages),
            links=tuple(self._link(plan, work, *link) for link in sorted(work.forward_bytes)),
            held_bytes=tuple(held),
            kept_bytes=tuple(
                own if each.memory.halfway is None else min(own, each.memory.halfway)
                for own, each in zip(held, stages, strict=True)
            ),
            limit_bytes=self._limit(held),
        )

    def _link(self, plan: DraftPlan, work: Workload, source: int, target: int) -> LinkSeconds:
        here, there = plan.stages[source].ranks[0], plan.stages[target].ranks[0]

        def seconds(amount: float) -> float:
            return 0.0 if here == there else self.network.message(here, there, amount).total

        forward = seconds(work.forward_bytes[source, target])
        back = seconds(work.backward_bytes.get((source, target), 0.0))
        return LinkSeconds(source=source, target=target, there=forward, back=back)

    def _limit(self, held: Sequence[float]) -> float | None:
        """What the fullest place has left for minibatches in flight."""
        if not self.types.memory_limited:
            return None
        left = []
        for place, ranks in enumerate(self.shape.ranks):
            own = [stage for stage, at in enumerate(self.shape.places) if at == place]
            whole = self.types.worst_of_ranks(ranks, self.request.cluster).memory
            left.append(whole - sum(self.memory[stage].total - held[stage] for stage in own))
        return max(0.0, min(left))
