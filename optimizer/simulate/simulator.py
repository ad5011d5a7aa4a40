"""Simulates the schedule that pd-train executes, action by action, on a cluster.

Each rank performs its list of actions in order, as the engine does. Passes and updates take their
time; a send takes none of the rank's; a receive waits for the message; a sum over the replicas of a
stage begins in their last backward pass of a round and is waited for after it; a norm waits for all
ranks, and then for an all-reduce of one number over them. Messages share the network (`play.py`); a
rank's messages to itself take no time. The halves of a split backward pass take what was measured
of them (`Node.backward_input_seconds`), calls and recomputation being in the first; where no
gradient is sent, the second does all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipedream.graph.choices import DEFAULT_ORDER, MICROBATCHES
from pipedream.graph.cluster import Cluster
from pipedream.graph.model import Graph
from pipedream.graph.plan import DraftPlan
from pipedream.graph.profile import TrainingOverheads
from pipedream.optimizer.cost.network import Network
from pipedream.optimizer.cuts.planning_graph import Floats
from pipedream.optimizer.simulate.long_rounds import (
    EXACTLY,
    ROUGHLY,
    ShortRound,
    lengthened,
    lengthened_by,
    rounds_to_play,
)
from pipedream.optimizer.simulate.play import Ranks, play
from pipedream.optimizer.simulate.program import KINDS, Program, program_of
from pipedream.optimizer.simulate.simulation import Simulation
from pipedream.optimizer.simulate.sums import gather_seconds, parts_of, pass_with_sums
from pipedream.optimizer.simulate.traffic import Traffic
from pipedream.optimizer.simulate.workload import UPDATE_RATE, StageWork, Workload
from pipedream.schedule.action import Action, Kind, Worker
from pipedream.schedule.overlap import LOOK_AHEAD
from pipedream.schedule.policy import policy
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PipelineSpec, in_order_of
from pipedream.schedule.steady_state import SteadySpan, bubble, longest_window

MOST_MOVES = 2_000_000
"""Stages times minibatches of the largest simulation: about five seconds."""

QUICK_MOVES = 100_000
"""The same for a simulation that is not asked for: about a quarter of a second."""

_LONG_IF_ROUGH = 5_000
"""Stages times minibatches of a rough simulation in which shorter rounds are tried first."""

_WORTH = 3
"""So many times shorter a round must be to be played in the place of a longer one."""

ASSUMED = tuple(1 + 0.01 * k for k in (-2, -1, -1, 0, 0, 0, 1, 1, 2))
"""How passes vary where the profile does not say so, as in `Noise`."""


@dataclass(frozen=True)
class Noise:
    """How passes vary from one to the next, at random and the same for a `seed`.

    `spread`: equally likely times of a pass, as multiples of its median. `levels`: by rank, of each
    of its devices, which wait for each other: how many times as long all its passes take; without
    any, ranks are one device each, and alike.
    """

    spread: Sequence[float]
    seed: int
    levels: Mapping[int, Sequence[float]] = field(default_factory=dict)

    def factors(self, actions: Mapping[int, int]) -> Floats:
        """How many times as long each action takes; `actions`: how many each rank has, in order."""
        devices = max(map(len, self.levels.values()), default=1)
        chance = np.random.default_rng(self.seed)
        drawn = chance.choice(np.array(self.spread), (sum(actions.values()), devices))
        levels = np.zeros((len(actions), devices))
        for row, rank in enumerate(actions):
            own = self.levels.get(rank, (1.0,))
            levels[row, : len(own)] = own
        slowest: Floats = (drawn * levels.repeat([*actions.values()], axis=0)).max(axis=1)
        return slowest


def simulate_plan(
    plan: DraftPlan,
    graph: Graph,
    update_rate: float = UPDATE_RATE,
    overheads: TrainingOverheads | None = None,
    most_moves: int = MOST_MOVES,
    noise: Noise | None = None,
    rough: bool = False,
) -> Simulation | None:
    """Simulates `plan` with the times of `graph`; None if that takes more than `most_moves`.

    Rounds have as many microbatches as the plan was made for. Very long rounds of flush are
    extrapolated from shorter ones (long_rounds.py), if there is no `noise`. `rough` as in
    `simulate_work`.
    """
    workload = Workload.of(plan, policy(_spec(plan)), graph, update_rate, overheads)
    return simulate_work(plan, workload, most_moves, noise, rough)


def _spec(plan: DraftPlan) -> PipelineSpec:
    spec = PipelineSpec(
        plan.schedule,
        plan.replicas,
        plan.links,
        microbatches=plan.predicted.microbatches or MICROBATCHES,
        max_in_flight=plan.max_in_flight,
    )
    return in_order_of(plan, spec)


def simulate_work(
    plan: DraftPlan,
    workload: Workload,
    most_moves: int,
    noise: Noise | None = None,
    rough: bool = False,
) -> Simulation | None:
    """As `simulate_plan`, with the work of the plan as it is given; `rough`: within a percent, and
    rounds that are long for that are extrapolated where they are nearly periodic.
    """
    spec = _spec(plan)
    microbatches = spec.microbatches
    ranks = [stage.ranks for stage in plan.stages]
    spec = in_order_of(plan, replace(spec, links=tuple(sorted(workload.forward_bytes))))
    rounds = 1 if rough else 2
    span = SteadySpan.for_simulation(policy(spec), rounds)
    repeats = plan.schedule in ("flush", "gpipe") and spec.order == DEFAULT_ORDER and noise is None
    whole, most = ShortRound(microbatches, microbatches), span.minibatches
    stages = len(plan.stages)
    long = repeats and most * stages > (_LONG_IF_ROUGH if rough else QUICK_MOVES)
    for played in rounds_to_play(plan.replicas, microbatches) if long else [whole]:
        spec = replace(spec, microbatches=played.length)
        span = SteadySpan.for_simulation(policy(spec), rounds)
        if played != whole and _WORTH * span.minibatches > most:
            continue
        if span.minibatches * stages > most_moves:
            return None
        simulation = simulate(
            Schedule(spec, span.minibatches), workload, plan.cluster, ranks, span, noise=noise
        )
        if played == whole:
            return simulation
        if plan.schedule == "gpipe":
            longer = replace(spec, microbatches=played.length + played.period)
            span = SteadySpan.for_simulation(policy(longer), rounds)
            other = simulate(
                Schedule(longer, span.minibatches), workload, plan.cluster, ranks, span
            )
            return lengthened_by(simulation, other, played, microbatches, plan.workers)
        alike = ROUGHLY if rough else EXACTLY
        extrapolated = lengthened(simulation, span, plan.replicas, played, microbatches, alike)
        if extrapolated is not None:
            return extrapolated
    return None


def simulate(
    schedule: Schedule,
    workload: Workload,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    span: SteadySpan,
    actions: Mapping[int, Sequence[Action]] | None = None,
    noise: Noise | None = None,
) -> Simulation:
    """Simulates `schedule`, whose worker (s, r) is on rank `ranks[s][r]` of the cluster.

    `actions` of each rank, which may run several workers [default: those of its order].
    """
    if actions is None:
        residents: dict[int, tuple[Worker, ...]] = {}
        for stage, replica in schedule.workers:
            rank = ranks[stage][replica]
            residents[rank] = (*residents.get(rank, ()), (stage, replica))
        numbers = tuple(residents)
        program = program_of(schedule.spec, schedule.minibatches, tuple(residents.values()))
    else:
        numbers = tuple(actions)
        program = Program.of(schedule, list(actions.values()))
    works = [
        workload.stages[stage].at(cluster.device(ranks[stage][replica]).speed)
        for stage, replica in program.workers
    ]
    begin, end = play_program(program, workload, works, cluster, ranks, numbers, noise)
    window = steady_state(program, end, span)
    period = (window[1] - window[0]) / len(span)
    busy = sum(
        (work.forward_seconds + work.backward_seconds) / schedule.spec.replicas[stage]
        + work.update_seconds / schedule.policy.round_size(stage)
        for (stage, _), work in zip(program.workers, works, strict=True)
    )
    return Simulation(
        seconds_per_minibatch=period,
        bubble=bubble(busy, len(numbers), period),
        steady_from=span.first,
        minibatches=len(span),
        window=window,
        ranks=numbers,
        program=program,
        works=tuple(works),
        begin=begin,
        end=end,
    )


def play_program(
    program: Program,
    workload: Workload,
    works: Sequence[StageWork],
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    numbers: Sequence[int],
    noise: Noise | None = None,
) -> tuple[Floats, Floats]:
    """When each action begins and ends, with the work of each worker; `numbers`: of the ranks."""
    network, seconds = Network(cluster), _seconds(program, works)
    closing = {}
    for stage, last in program.closing.items():
        alone = float(seconds[last].max(initial=0.0))
        parts = parts_of(workload.stages[stage], ranks[stage], network)
        closing[stage] = pass_with_sums(alone, parts)
        seconds[last] += closing[stage].seconds - alone
    for stage, work in enumerate(workload.stages):
        if work.gathered_bytes:
            gathering = gather_seconds(work, ranks[stage], network)
            seconds[program.updates_of(stage)] += gathering
    traffic = Traffic(program, workload, network, ranks)
    items, sums, streams = traffic.played(numbers, closing)
    if noise is not None:
        counts = np.diff(program.begin).tolist()
        seconds = seconds * noise.factors(dict(zip(numbers, counts, strict=True)))
    acting = Ranks(program.begin, program.op, program.subject, seconds)
    return play(acting, items, sums, streams, LOOK_AHEAD)


def _seconds(program: Program, works: Sequence[StageWork]) -> Floats:
    """Returns the seconds of each action on its worker; 0 for messages and sums. The first backward
    pass of a round adds no gradients, and the last, which a drained pipeline waits for, does.
    """
    table = np.array([[_of_kind(work, kind) for kind in KINDS] for work in works])
    seconds: Floats = table[program.worker, program.kind]
    if not any(work.sum_seconds for work in works):
        return seconds
    added = np.array([work.sum_seconds for work in works])[program.worker]
    meant = np.array([work.sum_seconds_each for work in works])[program.worker]
    adds = program.ends_backward & ~program.first_of_round
    return seconds + np.where(program.ends_backward, added * adds - meant, 0.0)


def _of_kind(work: StageWork, kind: Kind) -> float:
    return {
        Kind.FORWARD: work.forward_seconds,
        Kind.BACKWARD: work.backward_seconds,
        Kind.BACKWARD_INPUT: work.backward_input_seconds,
        Kind.BACKWARD_WEIGHT: work.backward_weight_seconds,
        Kind.UPDATE: work.update_seconds,
    }.get(kind, 0.0)


def steady_state(program: Program, end: Floats, span: SteadySpan) -> tuple[float, float]:
    """When it begins and ends, if the actions end at these times."""
    passes = program.ends_backward
    stages = np.array([stage for stage, _ in program.workers])[program.worker[passes]]
    return longest_window(stages, program.minibatch[passes], end[passes], span)
