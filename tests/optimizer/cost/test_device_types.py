"""Machines of several kinds: against every plan on every choice of machines, tried one by one."""

import math
from itertools import groupby, permutations

import pytest
from amount import examples
from cost_models import FORMULAS
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pipedream.graph.cluster import Cluster, DeviceType
from pipedream.graph.errors import UserError
from pipedream.graph.model import Graph, Node
from pipedream.optimizer.cost.device_types import DeviceTypes, MixedRadixCounter, WorstDevice
from pipedream.optimizer.cost.models import COST_MODELS
from pipedream.optimizer.cost.stages import Rules
from pipedream.optimizer.cuts.planning_graph import PlanningGraph
from pipedream.optimizer.search.bounds import throughput_bound
from pipedream.optimizer.search.latency import Latency
from pipedream.optimizer.search.planner import optimize
from pipedream.optimizer.search.request import Request

NEW = DeviceType(name="new", speed=1.0)
OLD = DeviceType(name="old", speed=0.5)


def cluster_of(machines, *kinds, **fields):
    """`kinds`: that of each component of the outermost level."""
    return Cluster(
        machines=machines,
        bandwidth=(1e9, 2e8)[: len(machines)],
        kinds=tuple({kind.name: kind for kind in kinds}.values()),
        machine_kinds=tuple(kind.name for kind in kinds),
        **fields,
    )


def plan_of(graph, cluster, model="paper", **more):
    return optimize(Request(graph, cluster, COST_MODELS[model](), **more)).plan


def test_two_fast_and_two_slow_machines(make_graph):
    # 20 | 20 | 10 | 10 ms, each with too many parameters to replicate: the fast machines, wherever
    # they stand, take the long stages; the slow ones, at half the speed, 20 ms for the short ones.
    # A slow machine for a long stage would take 40 ms.
    graph = make_graph(
        "a b c d", "a-b b-c c-d", a=(20, 0, 1e9), b=(20, 0, 1e9), c=(10, 0, 1e9), d=(10, 0, 1e9)
    )
    plan = plan_of(graph, cluster_of((4,), OLD, NEW, OLD, NEW))
    assert [stage.nodes for stage in plan.stages] == [("a",), ("b",), ("c",), ("d",)]
    assert sorted(rank for stage in plan.stages[:2] for rank in stage.ranks) == [1, 3]
    assert sorted(rank for stage in plan.stages[2:] for rank in stage.ranks) == [0, 2]
    assert [s.compute_seconds for s in plan.stages] == pytest.approx([0.02, 0.02, 0.02, 0.02])
    assert plan.predicted.seconds_per_minibatch == pytest.approx(0.02)
    assert plan.predicted.one_worker_seconds == pytest.approx(0.06)
    # 120 ms on a slow device; its parameters, 4 GB at 1 GB/s, cross 2 * 3/4 times for each.
    assert plan.predicted.data_parallel_seconds == pytest.approx(6.0)


def test_data_parallelism_goes_at_the_pace_of_the_slowest(make_graph):
    plan = plan_of(make_graph("a", a=(60, 0, 0)), cluster_of((3,), NEW, OLD, OLD))
    assert plan.predicted.data_parallel_seconds == pytest.approx(0.04)


def test_a_stage_on_both_kinds_goes_at_the_pace_of_the_slow(make_graph):
    # 60 ms on the new machine alone; on two of different kinds each takes the 120 ms that the old
    # one does, for every second minibatch: no gain. On all three 120 / 3.
    graph = make_graph("a", a=(60, 0, 0))
    plan = plan_of(graph, cluster_of((3,), NEW, OLD, OLD), rules=Rules(fewer_machines=True))
    assert plan.predicted.seconds_per_minibatch == pytest.approx(0.04)
    much_slower = DeviceType(name="slow", speed=0.1)
    plan = plan_of(graph, cluster_of((2,), much_slower, NEW), rules=Rules(fewer_machines=True))
    assert plan.stages[0].ranks == (1,)
    assert plan.predicted.seconds_per_minibatch == pytest.approx(0.06)


def test_devices_all_of_one_other_speed_scale_the_time(make_graph):
    graph = make_graph("a b", "a-b", a=(20, 0, 1e9), b=(20, 0, 1e9))
    for more in ({}, {"latency": Latency(4), "schedule": "flush"}):
        plan = plan_of(graph, cluster_of((2,), OLD, OLD), **more)
        assert plan.predicted.seconds_per_minibatch == pytest.approx(0.04)


def test_the_fast_machine_takes_the_long_stage_of_a_batch_wherever_it_stands(make_graph):
    # Too many parameters to replicate. 40 ms on the new machine and 20 on the old; the other way
    # round 20 and 80.
    graph = make_graph("a b", "a-b", a=(20, 0, 1e9), b=(40, 0, 1e9))
    for kinds, last in (((OLD, NEW), 1), ((NEW, OLD), 0)):
        plan = plan_of(graph, cluster_of((2,), *kinds), latency=Latency(4), schedule="flush")
        assert [stage.ranks for stage in plan.stages] == [(1 - last,), (last,)]
        assert plan.predicted.latency_seconds == pytest.approx(0.08 + 3 * 0.04)


def test_what_the_kinds_lack_is_said(make_graph):
    graph = make_graph("a b", "a-b", a=(10, 100, 5e6), b=(10, 100, 5e6))
    small = OLD.model_copy(update={"memory": 1e6})
    large = NEW.model_copy(update={"memory": 12e6})
    with pytest.raises(UserError) as caught:
        plan_of(graph, cluster_of((2,), large, small))
    message = caught.value.format_message()
    assert message.startswith(
        "memory of the cluster's kinds: 1 MB: no plan fits; the closest needs"
    )
    assert "devices with more" in message
    # The large one holds both nodes' weights and gradients if the small one may be left out.
    large = NEW.model_copy(update={"memory": 24e6})
    plan = plan_of(graph, cluster_of((2,), small, large), rules=Rules(fewer_machines=True))
    assert [stage.ranks for stage in plan.stages] == [(1,)]
    with pytest.raises(UserError, match=r"^--memory 12 MB: no plan fits"):
        plan_of(graph, cluster_of((2,), large, large), memory=12e6, rules=Rules(straight=True))


def test_the_worst_device_has_the_least_speed_and_the_least_memory():
    fast_small, slow_large = NEW.model_copy(update={"memory": 8.0}), OLD
    types = DeviceTypes.of(cluster_of((3,), fast_small, slow_large, fast_small), memory=None)
    assert types.machines == ((0, 2), (1,))
    assert types.worst_of((2, 0)) == WorstDevice(1.0, 8.0)
    assert types.worst_of((0, 1)) == WorstDevice(0.5, math.inf)
    assert types.worst_of((1, 1)) == WorstDevice(0.5, 8.0)
    assert len(types.distinct) == 3
    assert (
        DeviceTypes.of(cluster_of((2,), fast_small, slow_large), memory=4.0).smallest_memory == 4.0
    )


def test_kinds_that_differ_in_name_alone_are_one():
    twin = NEW.model_copy(update={"name": "twin"})
    assert len(DeviceTypes.of(cluster_of((2,), NEW, twin)).worst) == 1


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_a_tally_adds_up(counts):
    tally = MixedRadixCounter(counts)
    for taken in tally.choices():
        remaining_after = tally.remaining_after(taken)
        assert remaining_after[-1] + tally.encode(taken) == tally.size - 1
        assert len(set(remaining_after)) == math.prod(
            n - t + 1 for n, t in zip(counts, taken, strict=True)
        )
        assert all(tally.total(b) <= sum(counts) - sum(taken) for b in remaining_after)
        assert tally.total(tally.encode(taken)) == sum(taken)


def graphs(most):
    return st.integers(1, most).flatmap(
        lambda count: st.builds(
            make,
            st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=count, max_size=count),
            st.sets(st.sampled_from([(a, b) for b in range(count) for a in range(b)] or [(0, 0)])),
        )
    )


def make(figures, edges):
    nodes = {
        f"n{i}": Node(
            id=f"n{i}",
            description=f"Layer{i}",
            forward_seconds=(1 + milliseconds) * 1e-3,
            activation_bytes=(outputs * 1e5,),
            parameter_bytes=parameters * 1e6,
        )
        for i, (milliseconds, outputs, parameters) in enumerate(figures)
    }
    return Graph(nodes, tuple((f"n{a}", f"n{b}") for a, b in sorted(edges) if a < b))


def taken_by(plan):
    """The components of the outermost level that each of its stages has, from the ranks."""
    sets = ({plan.cluster.machine(rank) for rank in stage.ranks} for stage in plan.stages)
    return [sorted(machines) for machines, _ in groupby(sets)]


def check(by_hand, graph, cluster, model, rules, schedule="flush", memory=None, recompute="auto"):
    cuts = by_hand.downsets(graph)
    assume(len(cuts) <= 10)
    machines = cluster.machines
    assume(not rules.straight or rules.fewer_machines or cluster.devices <= len(graph.nodes))
    costs = by_hand.Costs(graph, machines, cluster.bandwidth, model, None, cluster.latency)
    components = range(machines[-1])
    speeds = [cluster.kind(component).speed for component in components]
    limits = [
        min(cluster.kind(component).memory or math.inf, memory or math.inf)
        for component in components
    ]
    best = min(
        (
            costs.time_on_kinds(plan, taken, speeds, limits, schedule, recompute)
            for plan in by_hand.every_plan(cuts, machines, rules.straight, rules.fewer_machines)
            for taken in by_hand.assignments([stage[2] for stage in plan], components)
        ),
        default=math.inf,
    )
    request = Request(
        graph, cluster, COST_MODELS[model](), schedule, memory, rules, recompute=recompute
    )
    if best == math.inf:
        with pytest.raises(UserError, match="no plan fits"):
            optimize(request)
        return
    plan = optimize(request).plan
    assert plan.predicted.seconds_per_minibatch == pytest.approx(best, rel=1e-9)
    bound = throughput_bound(PlanningGraph.of(graph), cluster, request.model, rules.straight)
    assert bound <= best * (1 + 1e-12)
    nested, taken = by_hand.nest(plan, graph), taken_by(plan)
    time = costs.time_on_kinds(nested, taken, speeds, limits, schedule, recompute)
    assert time == pytest.approx(best, rel=1e-9)
    if not rules.fewer_machines:
        assert plan.workers == cluster.devices


SPEED = st.sampled_from([0.3, 0.5, 1.0, 2.0])
MEMORY = st.sampled_from([None, 2e7, 4e7, 8e7])


@st.composite
def two_kinds(draw):
    """Small clusters with machines of two kinds in any order, or of one of them."""
    machines = draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (1, 3), (2, 3)]))
    kinds = [DeviceType(name=name, speed=draw(SPEED), memory=draw(MEMORY)) for name in "xy"]
    count = machines[-1]
    which = draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))
    return cluster_of(machines, *which, latency=(1e-4, 2e-3)[: len(machines)])


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(
    graph=graphs(6),
    cluster=two_kinds(),
    memory=st.sampled_from([None, None, 3e7]),
    model=st.sampled_from(FORMULAS),
    rules=st.builds(Rules, st.booleans(), st.booleans()),
    schedule=st.sampled_from(["weight-stashing", "flush"]),
    recompute=st.sampled_from(["never", "auto", "always"]),
)
def test_plans_on_two_kinds_equal_brute_force(
    by_hand, graph, cluster, memory, model, rules, schedule, recompute
):
    check(by_hand, graph, cluster, model, rules, schedule, memory, recompute)


@pytest.mark.slow
@example(
    graph=make([(0, 0, 0), (0, 0, 1), (2, 0, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0)], set()),
    speeds=(0.3, 0.3, 0.3),
    inner=(2,),
    model="measured",
    straight=True,
)
@settings(max_examples=examples(50), deadline=None)
@given(
    graph=graphs(9),
    speeds=st.tuples(SPEED, SPEED, SPEED),
    inner=st.sampled_from([(), (2,)]),
    model=st.sampled_from(FORMULAS),
    straight=st.booleans(),
)
def test_the_certificate_holds_on_kinds_and_with_latency(graph, speeds, inner, model, straight):
    kinds = [DeviceType(name=n, speed=s) for n, s in zip("xyz", speeds, strict=True)]
    latency = (1e-4, 2e-3)[: len(inner) + 1]
    cluster = cluster_of((*inner, 3), *kinds, latency=latency)
    rules = Rules(straight, fewer_machines=True)
    request = Request(graph, cluster, COST_MODELS[model](), rules=rules)
    best = optimize(request).plan.predicted.seconds_per_minibatch
    rough = optimize(request, most_cuts=6).plan.predicted
    assert rough.lower_bound_seconds <= best * (1 + 1e-9)
    assert best <= rough.seconds_per_minibatch * (1 + 1e-9)


@settings(max_examples=examples(15), deadline=None)
@given(graph=graphs(5), speeds=st.tuples(SPEED, SPEED, SPEED), model=st.sampled_from(["paper"]))
def test_three_kinds_equal_brute_force(by_hand, graph, speeds, model):
    kinds = [DeviceType(name=n, speed=s) for n, s in zip("xyz", speeds, strict=True)]
    cluster = cluster_of((4,), *kinds, kinds[0])
    check(by_hand, graph, cluster, model, Rules())


def in_order(plan):
    """The stages as by_hand's flat pipelines have them, the machines in the order of first use."""
    inner = math.prod(plan.cluster.machines[:-1])
    used = {}
    for stage in plan.stages:
        used |= dict.fromkeys(sorted(plan.cluster.machine(rank) for rank in stage.ranks))
    order, stages, before = list(used), [], frozenset()
    for stage in plan.stages:
        places = ((plan.cluster.machine(rank), rank % inner) for rank in stage.ranks)
        devices = sorted(order.index(machine) * inner + device for machine, device in places)
        assert devices == list(range(devices[0], devices[-1] + 1))
        after = before | frozenset(stage.nodes)
        stages.append((before, after, range(devices[0], devices[-1] + 1)))
        before = after
    return order, stages


def batch_on_kinds(by_hand, costs, pipeline, order, cluster, memory, recompute, microbatches):
    """Seconds of a batch where the machines are filled in this order; infinite if it does not fit.

    A stage is as slow as its slowest machine, and has the memory of its smallest.
    """
    inner = math.prod(cluster.machines[:-1])
    kinds = [
        [cluster.kind(order[machine]) for machine in {device // inner for device in devices}]
        for _, _, devices in pipeline
    ]
    limits = [
        min(math.inf if limit is None else limit for kind in of for limit in (kind.memory, memory))
        for of in kinds
    ]
    found = by_hand.flat_within(costs, pipeline, "flush", limits, recompute)
    if found is None:
        return math.inf
    alone = {
        (start, end): found[1][start, end] / min(kind.speed for kind in of)
        for (start, end, _), of in zip(pipeline, kinds, strict=True)
    }
    times = by_hand.flat_times(costs, pipeline, alone)
    return sum(times) + (microbatches - 1) * max(times)


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(
    graph=graphs(6),
    cluster=two_kinds(),
    memory=st.sampled_from([None, None, 3e7]),
    model=st.sampled_from(FORMULAS),
    rules=st.builds(Rules, st.booleans(), st.booleans()),
    recompute=st.sampled_from(["never", "auto", "always"]),
    microbatches=st.sampled_from([1, 4, 32]),
)
def test_batches_on_two_kinds_equal_brute_force(
    by_hand, graph, cluster, memory, model, rules, recompute, microbatches
):
    machines = cluster.machines
    cuts = by_hand.downsets(graph)
    assume(len(cuts) <= 9)
    assume(not rules.straight or rules.fewer_machines or cluster.devices <= len(graph.nodes))
    costs = by_hand.Costs(graph, machines, cluster.bandwidth, model, None, cluster.latency)
    orders = {
        tuple(cluster.machine_kinds[machine] for machine in order): order
        for order in permutations(range(machines[-1]))
    }
    limits = cluster, memory, recompute, microbatches
    pipelines = list(by_hand.flat_pipelines(cuts, machines, rules.straight, rules.fewer_machines))
    best = min(
        batch_on_kinds(by_hand, costs, pipeline, order, *limits)
        for pipeline in pipelines
        for order in orders.values()
    )
    request = Request(
        graph,
        cluster,
        COST_MODELS[model](),
        "flush",
        memory,
        rules,
        Latency(microbatches),
        recompute=recompute,
    )
    if best == math.inf:
        with pytest.raises(UserError, match="no plan fits"):
            optimize(request)
        return
    outcome = optimize(request)
    order, pipeline = in_order(outcome.plan)
    time = batch_on_kinds(by_hand, costs, pipeline, order, *limits)
    assert outcome.plan.predicted.latency_seconds == pytest.approx(time, rel=1e-9)
    assert time == pytest.approx(best, rel=1e-9)
    assert outcome.exact
    if memory or any(kind.memory for kind in cluster.kinds) or rules.straight:
        return  # over a few cuts there may be no plan that fits, or gives each device a stage
    rough = optimize(request, most_cuts=4).plan.predicted
    assert rough.latency_lower_bound_seconds <= best * (1 + 1e-9)
    assert best <= rough.latency_seconds * (1 + 1e-9)
