"""The report that pd-optimize prints."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from pipedream.graph.cluster import Cluster
from pipedream.graph.model import Graph, Node
from pipedream.graph.plan import Plan, Predicted, Stage
from pipedream.graph.profile import Machine, Profile
from pipedream.graph.shown.tables import end_of, make_console, print_table
from pipedream.graph.units import show_bytes, show_seconds
from pipedream.optimizer.cost.models import DEFAULT_COST_MODEL
from pipedream.optimizer.report.answer import answer_rows
from pipedream.optimizer.report.tables import (
    make_grid,
    make_table,
    show_count,
    show_replicas,
    table_of,
)
from pipedream.optimizer.search.outcome import Outcome, ScheduleTime

_WIDEST_NAME = 24
_WIDEST_BLOCK = 40
_ROUNDING = 1e-9
_ITEMS = {
    "parameters": "para-\nmeters",
    "weight_versions": "older\nversions",
    "optimizer_state": "optimizer\nstate",
    "gradients": "gradients",
    "buckets": "buckets",
    "activations": "activations",
    "recomputed": "re-\ncomputed",
    "inputs": "received",
    "workspace": "work-\nspace",
    "allocator": "allo-\ncator",
}
"""The items of `StageMemory`, as the columns of the table are called."""
_RARE_ITEMS = ("buckets", "recomputed", "allocator")
"""Without a column where no stage has any."""
_NARROW = 100  # columns; tables are set closer on fewer


def print_report(
    outcome: Outcome,
    graph: Graph,
    console: Console | None = None,
    profile: Profile | None = None,
    beside: Sequence[Table] = (),
) -> None:
    """Prints the time to expect, the tables `beside` it, the stages, their memory, and other plans.

    `profile`: the graph's, if that is known.
    """
    console = console or make_console()
    console.print(_times(outcome, profile))
    for table in beside:
        print_table(console, table)
    modules = {} if profile is None else profile.modules
    print_table(console, _stage_table(outcome, graph, modules, console.width < _NARROW))
    print_table(console, _memory_table(outcome))
    if outcome.rivals:
        print_table(console, _rival_table(outcome))
    if outcome.schedules:
        print_table(console, _schedule_table(outcome))
    machine = None if profile is None else profile.machine
    estimated = None if profile is None else profile.estimated
    if estimated is not None:
        line = f"Estimated, not measured: {estimated.words}."
        console.print(line, markup=False, soft_wrap=not console.is_terminal)
    for remark in (*outcome.notes, *_assumptions(outcome, machine), _remark(outcome)):
        console.print(remark, markup=False, soft_wrap=not console.is_terminal)


def _stage_table(outcome: Outcome, graph: Graph, modules: Mapping[str, str], narrow: bool) -> Table:
    """A row per stage; a narrow page leaves out the number of nodes."""
    plan, seconds = outcome.plan, outcome.plan.predicted.seconds_per_minibatch
    machines = " x ".join(str(count) for count in plan.cluster.machines)
    left_out = {"nodes"} if narrow else set()
    if len(plan.cluster.kinds) > 1:
        machines += f": {_kinds(plan.cluster, range(plan.cluster.devices))}"
    else:
        left_out.add("kinds")
    if len(set(plan.rank_map)) == len(plan.stages):
        left_out.add("place")
    rows = [
        {
            "stage": str(stage.stage),
            "place": str(place),
            "nodes": str(len(stage.nodes)),
            "first and last": _span(stage, graph, modules),
            "time": show_seconds(stage.compute_seconds),
            "replicas": str(stage.replicas),
            "kinds": _kinds(plan.cluster, stage.ranks),
            "per\nminibatch": show_seconds(figures.seconds),
            "limited\nby": figures.limit,
            "in\nflight": str(figures.in_flight),
            "memory": show_bytes(stage.memory_bytes),
        }
        for stage, figures, place in zip(plan.stages, outcome.figures, plan.rank_map, strict=True)
    ]
    order = f" in order {plan.order}" if plan.order else ""
    stages = show_count(len(plan.stages), "stage")
    return table_of(
        f"{stages} on {plan.workers} of {plan.cluster.devices} devices"
        f" ({machines}), {plan.schedule}{order}, cost model {plan.predicted.cost_model}",
        "Time: of a minibatch on one worker; per minibatch over all replicas, the slowest stage in"
        " bold.",
        [{name: row[name] for name in row if name not in left_out} for row in rows],
        bold=[n for n, figures in enumerate(outcome.figures) if figures.seconds == seconds],
        wrapped=("first and last", "kinds"),
    )


def _kinds(cluster: Cluster, ranks: Iterable[int]) -> str:
    """Returns the number of devices of each type, in words."""
    count = Counter(cluster.device(rank).name for rank in ranks)
    names = (kind.name for kind in cluster.kinds)
    return ", ".join(f"{count[name]} {name}" for name in names if count[name])


def _memory_table(outcome: Outcome) -> Table:
    plan = outcome.plan
    measured = "as measured" if outcome.measured else "assumed to be the nodes' outputs"
    recomputing = [
        f"{stage.stage} ({len(stage.recomputed_nodes)} of {len(stage.nodes)} nodes)"
        if stage.recomputed_nodes
        else str(stage.stage)
        for stage in plan.stages
        if stage.recompute
    ]
    note = f" Forward pass recomputed: stage {', '.join(recomputing)}." if recomputing else ""
    divided = [str(stage.stage) for stage in plan.stages if stage.zero]
    if divided:
        note += f" Replicas divide the optimizer's state (ZeRO-1): stage {', '.join(divided)}."
    offloading = [str(stage.stage) for stage in plan.stages if stage.offload]
    if offloading:
        note += f" Activations moved to the host: stage {', '.join(offloading)}."
    if outcome.rank_bytes is not None:
        note += f" A rank holds up to {show_bytes(outcome.rank_bytes)} at once, of all its stages."
    if outcome.room:
        note += (
            f" {show_bytes(outcome.room)} more of each device are for {outcome.room_for} (--room)."
        )
    known = [stage.memory for stage in plan.stages if stage.memory is not None]
    items = [
        name
        for name in _ITEMS
        if name not in _RARE_ITEMS or any(getattr(each, name) for each in known)
    ]
    table = make_table(
        f"Memory of one worker, with {plan.optimizer}'s state (--optimizer)",
        f"At its peak. Activations: what the backward passes need, {measured}.{note}",
        *("stage", *(_ITEMS[name] for name in items), "in all"),
    )
    for stage in plan.stages:
        if stage.memory is not None:
            sizes = (show_bytes(getattr(stage.memory, name)) for name in items)
            table.add_row(str(stage.stage), *sizes, show_bytes(stage.memory_bytes))
    return table


def _span(stage: Stage, graph: Graph, modules: Mapping[str, str]) -> str:
    """Returns the paths of the first and the last module, or the classes of these layers."""
    nodes = [graph.nodes[name] for name in stage.nodes]
    working = [node for node in nodes if not node.is_input] or nodes
    ends = [working[0], working[-1]] if len(working) > 1 else working
    return " ... ".join(dict.fromkeys(_name(node, modules.get(node.id, "")) for node in ends))


def _name(node: Node, module: str) -> str:
    if len(module) > _WIDEST_NAME:  # from the number of the block on, if that is not too wide
        block = re.search(r"[^.]*\d.*", module)
        if block is not None and len(block[0]) <= _WIDEST_BLOCK:
            return module if block[0] == module else f"...{block[0]}"
        return end_of(module, _WIDEST_NAME)
    layer = node.description.partition("(")[0]
    if module and not re.search("[a-z]", module):  # the number of a layer in nn.Sequential
        return f"{module}: {layer}"[:_WIDEST_NAME]
    return module or f"{node.id} {layer}"[:_WIDEST_NAME].rstrip()


def _times(outcome: Outcome, profile: Profile | None) -> Table:
    """Makes a table of the time to be expected, and what it is compared with and made of."""
    predicted = outcome.plan.predicted
    seconds = predicted.seconds_per_minibatch
    table = make_grid()
    expected = predicted.expected_seconds_per_minibatch
    if expected is not None:
        table.add_row("expected in a run", show_seconds(expected), _of_runs(predicted))
        seconds = expected
    batch, formula = 1, predicted.seconds_per_minibatch
    if predicted.latency_seconds is not None and predicted.microbatches is not None:
        batch = predicted.microbatches
        per_batch = predicted.latency_seconds if expected is None else batch * expected
        remark = show_count(batch, "microbatch", "es")
        waiting = 1 - batch * predicted.seconds_per_minibatch / predicted.latency_seconds
        if waiting > _ROUNDING:
            remark += f"; the slowest stage waits {waiting:.0%} of it"
        table.add_row("per batch", show_seconds(per_batch), remark)
        seconds, formula = per_batch / batch, predicted.latency_seconds / batch
    if profile is not None:
        for row in answer_rows(outcome.plan, profile, seconds, outcome.rank_bytes):
            table.add_row(*row)
    rows = (
        ("data parallelism", predicted.data_parallel_seconds),
        ("one worker", predicted.one_worker_seconds),
    )
    for name, time in rows:
        table.add_row(name, show_seconds(batch * time), _compared(outcome, name, time / seconds))
    if outcome.plan.order is None:
        table.add_row("in closed form", show_seconds(formula), _parts(outcome))
    table.add_row("simulated", *_simulated(outcome.plan))
    return table


def _of_runs(predicted: Predicted) -> str:
    """Returns what stands beside the expected time: between which seconds runs take."""
    if predicted.expected_interval is None:
        return "per minibatch; passes vary and workers wait for the slowest"
    least, most = map(show_seconds, predicted.expected_interval)
    return f"per minibatch ({least} to {most} in nine of ten runs); workers wait for the slowest"


def _compared(outcome: Outcome, name: str, rate: float) -> str:
    remark, but = f"this plan is {rate:.2f} times as fast", "but"
    if 0 < rate < 0.995:
        remark, but = f"this plan is {1 / rate:.2f} times slower than {name}", "which"
    if outcome.memory is not None and outcome.whole_model_bytes > outcome.memory:
        needs = show_bytes(outcome.whole_model_bytes)
        remark += f", {but} does not fit: it needs {needs} on each device"
    return remark


def _parts(outcome: Outcome) -> str:
    slowest = max(outcome.figures, key=lambda figures: figures.seconds)
    number = outcome.figures.index(slowest)
    return f"stage {number}, the slowest, is limited by {slowest.limit}"


def _rival_table(outcome: Outcome) -> Table:
    plan = outcome.plan
    own = plan.predicted.simulated
    rows = [
        {
            "plan": rival.name,
            "replicas\nof stages": show_replicas(rival.replicas),
            "simulated": show_seconds(rival.seconds),
            "as long": f"{rival.seconds / own.seconds_per_minibatch:.2f}" if own else "-",
            "because of": rival.why if rival.fits else "does not fit",
        }
        for rival in outcome.rivals
    ]
    return table_of(
        "Other plans, simulated",
        f"Per minibatch, under {plan.schedule}; as long: as a multiple of this plan's time.",
        rows,
        wrapped=("plan", "because of"),
    )


def _schedule_table(outcome: Outcome) -> Table:
    """Makes a table of the best plan under each schedule, for as many examples."""
    plan = outcome.plan
    times = (ScheduleTime.of(plan), *outcome.schedules)
    count = next((each.microbatches for each in times if each.microbatches is not None), 1)
    rows = [
        {
            "schedule": each.schedule,
            "replicas\nof stages": show_replicas(each.replicas),
            "per\nminibatch": show_seconds(each.seconds),
            f"for {count}": show_seconds(count * each.seconds),
            "updates": "after every minibatch of each replica"
            if each.microbatches is None
            else f"after every {each.microbatches} minibatches",
        }
        for each in times
    ]
    return table_of(
        "The fastest plan found under each schedule",
        "Simulated. Flush trains as one worker would; the others learn from older weights.",
        rows,
        bold=[0],
        wrapped=("schedule", "updates"),
    )


def _simulated(plan: Plan) -> tuple[str, str]:
    simulated = plan.predicted.simulated
    if simulated is None:
        return "-", f"too long to simulate for {plan.workers} workers"
    seconds = show_seconds(simulated.seconds_per_minibatch)
    waiting = f"workers wait or communicate {simulated.bubble:.1%} of the time"
    return seconds, f"every pass as profiled; {waiting}"


def _remark(outcome: Outcome) -> str:
    predicted, asked = outcome.plan.predicted, outcome.plan.asked
    straight = asked is not None and asked.straight
    what = "straight plans" if straight else "plans"
    if asked is not None and asked.group != "none":
        what += f" that keep groups whole (--group {asked.group})"
    if predicted.cost_model == DEFAULT_COST_MODEL and predicted.simulated is not None:
        bound = predicted.lower_bound_seconds
        gap = _gap(predicted.simulated.seconds_per_minibatch / bound - 1) if bound else "no bound"
        found = f"The fastest of {outcome.considered} {what} simulated"
        return (
            f"{'The stages of --split' if outcome.user_split else found}; {gap}"
            f" ({show_seconds(bound)} by a lower bound)."
        )
    seconds, bound = predicted.seconds_per_minibatch, predicted.lower_bound_seconds
    if predicted.latency_seconds is not None:
        seconds, bound = predicted.latency_seconds, predicted.latency_lower_bound_seconds or 0.0
        what = "pipelines of stages on devices of one machine or on whole machines"
        if straight:
            what = "straight pipelines"
    if outcome.exact:
        return f"The best of all {what} over {outcome.considered} cuts under this cost model."
    gap = _gap(seconds / bound - 1)
    if predicted.latency_seconds is not None:
        return f"The best found of all {what} over {outcome.considered} cuts; {gap}."
    return (
        "The graph can be cut in too many ways to try them all: the best plan over"
        f" {outcome.considered} likely cuts; {gap}."
    )


def _assumptions(outcome: Outcome, profiled_on: Machine | None) -> Iterator[str]:
    """Yields what the time rests on that nobody measured."""
    plan = outcome.plan
    if plan.predicted.cost_model != DEFAULT_COST_MODEL:
        yield (
            f"Cost model {plan.predicted.cost_model}: a formula that may be far from a run's time;"
            f" leave out --cost-model to choose by simulation."
        )
        return
    if plan.workers > 1 and not plan.cluster.measured:
        yield (
            "Assumed: links that carry their --bandwidth and slow no pass down;"
            " pd-profile --network or --cluster auto measures that."
        )
    if profiled_on is not None and any(kind.speed != 1 for kind in plan.cluster.kinds):
        speeds = " or ".join(dict.fromkeys(f"{kind.speed:g}" for kind in plan.cluster.kinds))
        yield (
            f"Assumed: devices {speeds} times as fast in every layer as the one profiled,"
            f" {_device(profiled_on)}."
        )
    elif profiled_on is not None and not plan.cluster.measured:
        yield (
            f"Assumed: devices as fast as the one profiled, {_device(profiled_on)};"
            " --speed says otherwise."
        )
    on_one = min(plan.workers, plan.cluster.machines[0])
    here = profiled_on is not None and profiled_on.device == "cpu" and not plan.cluster.kinds
    if profiled_on is not None and here and profiled_on.workers < on_one:
        yield (
            f"Assumed: passes as fast with {on_one} workers at work as with {profiled_on.workers},"
            f" as they were profiled. pd-profile --workers {on_one} measures that."
        )


def _device(machine: Machine) -> str:
    threads = f" with {show_count(machine.threads, 'thread')}" * (machine.device == "cpu")
    return machine.device_name + threads


def _gap(share: float) -> str:
    """Returns how far the plan may be from the best, in words, rounded up."""
    if share < _ROUNDING:
        return "no other plan is faster"
    return f"at most {math.ceil(1000 * share - 1e-6) / 10:.1f} % slower than the best possible"
