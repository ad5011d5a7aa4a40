"""What is to be scheduled: stages, their replicas, when they update, how much they may hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipedream.graph.choices import DEFAULT_ORDER, ScheduleName
from pipedream.graph.plan import DraftPlan, OrderTimes
from pipedream.schedule.action import StageLink, Worker


@dataclass(frozen=True)
class PassTimes:
    """Says what the passes of a microbatch take, by stage, for orders that are found for it.

    Seconds of the forward pass, the gradients of the inputs, those of the weights; `there` and
    `back`: until an activation and its gradient have come over each link, in the order of the
    spec's links. Bytes `held` between forward and backward pass, and `kept` of them between the
    halves of a backward pass; `limit`: the most that each place may hold [default: any].
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    there: tuple[float, ...]
    back: tuple[float, ...]
    held: tuple[float, ...]
    kept: tuple[float, ...]
    limit: tuple[float, ...] | None = None

    @staticmethod
    def of(planned: OrderTimes, links: Sequence[StageLink], places: int) -> PassTimes:
        """Returns what a plan says; messages of links that it does not name take no time."""
        known = {(link.source, link.target): link for link in planned.links}
        named = [known.get(link) for link in links]
        limit = planned.limit_bytes
        return PassTimes(
            planned.forward,
            planned.backward_input,
            planned.backward_weight,
            tuple(0.0 if link is None else link.there for link in named),
            tuple(0.0 if link is None else link.back for link in named),
            planned.held_bytes,
            planned.kept_bytes,
            None if limit is None else (limit,) * places,
        )

    @staticmethod
    def unit(stages: int, links: int) -> PassTimes:
        """All passes take 1, messages nothing; a microbatch of a stage is one byte."""
        one, none = (1.0,) * stages, (0.0,) * links
        return PassTimes(one, one, one, none, none, one, one)


@dataclass(frozen=True)
class PipelineSpec:
    """A pipeline, for any number of minibatches.

    `replicas`: of each stage; minibatch b runs at a stage of r replicas on replica b mod r,
    backward where forward went. `links`: the pairs of stages that exchange tensors, adjacent or
    skipping. `weight-stashing` and `vertical-sync` update a stage of r replicas after every r
    times `accumulate` minibatches, the others every stage after `microbatches`. `max_in_flight`:
    the most minibatches between forward and backward on a worker of each stage; None for as many
    as are of use. `tied`: stages that share parameters with one another, whose gradients are added
    up over all of them; only schedules that update all stages at the same minibatches train these.
    `order`: in which order a rank does its passes, by its name in `schedule.ORDERS`. `rank_map`:
    the place of each stage, see `place_of`. `times`: for orders that are found for them.
    `joint_norm`: before each update all workers of all stages agree on the norm of the whole
    model's gradient; only with schedules that update all stages at the same minibatches. `teams`:
    the stages whose workers are teams of ranks; each adds up its parts of the gradients.
    """

    name: ScheduleName
    replicas: tuple[int, ...]
    links: tuple[StageLink, ...] = ()
    microbatches: int = 1
    accumulate: int = 1
    max_in_flight: tuple[int, ...] | None = None
    tied: tuple[int, ...] = ()
    order: str = DEFAULT_ORDER
    rank_map: tuple[int, ...] = ()
    times: PassTimes | None = None
    joint_norm: bool = False
    teams: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.replicas)
        assert stages > 0, "a pipeline has stages"
        assert min(self.replicas) > 0, self.replicas
        assert self.microbatches > 0, self.microbatches
        assert all(0 <= source < target < stages for source, target in self.links), self.links
        assert self.links == tuple(sorted(set(self.links))), self.links
        assert len(self.rank_map) in (0, stages), self.rank_map

    @property
    def workers(self) -> Iterator[Worker]:
        for stage in range(len(self.replicas)):
            yield from self.of_stage(stage)

    def of_stage(self, stage: int) -> list[Worker]:
        """Returns its workers, replica by replica."""
        return [(stage, replica) for replica in range(self.replicas[stage])]

    def sources(self, stage: int) -> tuple[int, ...]:
        """Returns the stages that send activations to `stage`."""
        return self._neighbours[stage][0]

    def targets(self, stage: int) -> tuple[int, ...]:
        """Returns the stages that send gradients to `stage`."""
        return self._neighbours[stage][1]

    @cached_property
    def _neighbours(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [
            (
                tuple(source for source, target in self.links if target == stage),
                tuple(target for source, target in self.links if source == stage),
            )
            for stage in range(len(self.replicas))
        ]

    @cached_property
    def place_of(self) -> tuple[int, ...]:
        """Returns the place of each stage among the ranks of the pipeline; by default each has its
        own.

        Where the stages have replicas, a place has as many ranks, each with that replica of all
        stages there.
        """
        return self.rank_map or tuple(range(len(self.replicas)))

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Returns the stages of each place, in ascending order."""
        stages = range(len(self.replicas))
        return tuple(
            tuple(stage for stage in stages if self.place_of[stage] == place)
            for place in range(max(self.place_of) + 1)
        )

    @cached_property
    def pass_times(self) -> PassTimes:
        """Returns the spec's, or the unit of each."""
        return self.times or PassTimes.unit(len(self.replicas), len(self.links))

    def delay(self, link: StageLink, is_gradient: bool) -> float:
        """Returns the seconds until a message has come over the link; none within a place."""
        source, target = link
        if self.place_of[source] == self.place_of[target]:
            return 0.0
        seconds = self.pass_times.back if is_gradient else self.pass_times.there
        return seconds[self._link_number[link]]

    @cached_property
    def _link_number(self) -> dict[StageLink, int]:
        return {link: number for number, link in enumerate(self.links)}

    def reduces(self, stage: int) -> bool:
        """Returns whether its gradients are added up, over several workers or within a team."""
        return self.replicas[stage] > 1 or stage in self.tied or stage in self.teams


def in_order_of(plan: DraftPlan, spec: PipelineSpec) -> PipelineSpec:
    """Returns `spec` with the plan's order of passes, and all that the order depends on."""
    places, planned = plan.rank_map, plan.order_times
    times = None if planned is None else PassTimes.of(planned, spec.links, max(places) + 1)
    order = plan.order or DEFAULT_ORDER
    teams = tuple(stage.stage for stage in plan.stages if stage.devices > 1)
    return replace(spec, order=order, rank_map=places, times=times, teams=teams)
