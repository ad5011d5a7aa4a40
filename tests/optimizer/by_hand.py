"""Plans added up from their nodes, and tried one by one: written without the planner's code.

A nested plan is a list of stages (start, end, replicas, inside): two nested sets of nodes, on how
many components of the level below, and the nested plan inside each of these (None on a device).
"""

import math
from functools import cache
from itertools import combinations, groupby, pairwise, product

from pipedream.graph.model import Graph


class Costs:
    """A graph (all its nodes working), a cluster and a cost model by name, costed with sets."""

    def __init__(self, graph, machines, bandwidth, model, compression=None, latency=None):
        self.nodes = graph.nodes
        self.edges = graph.edges
        self.machines = machines
        self.bandwidth = bandwidth
        self.model = model
        self.compression = compression
        self.latency = latency or [0] * len(machines)
        # Asked anew for each of many plans that share their stages.
        self.compute, self.stage = cache(self.compute), cache(self.stage)
        self.worker_memory = cache(self.worker_memory)

    def compute(self, names):
        return math.fsum(
            self.nodes[n].forward_seconds + self.nodes[n].backward_seconds for n in names
        )

    def parameters(self, names):
        return math.fsum(self.nodes[n].parameter_bytes for n in names)

    def outputs(self, names):
        return math.fsum(sum(self.nodes[n].activation_bytes) for n in names)

    def across(self, cut):
        return self.outputs({a for a, b in self.edges if a in cut and b not in cut})

    def read(self, start, end):
        return self.outputs({a for a, b in self.edges if a in start and b in end - start})

    def stage(self, level, start, end, replicas, inner, first):
        """Seconds per minibatch of a stage on `replicas` components of `level` (0 innermost)."""
        m, B, W = replicas, self.bandwidth[level], self.parameters(end - start)
        a_in, a_out = self.across(start), self.across(end)
        if self.model == "paper":
            boundary = 0 if first else 2 * a_in / B / (self.compression or 1)
            return max(max(inner, 2 * (m - 1) * W / B) / m, boundary)
        if self.model == "measured":
            delay = self.latency[level]
            reduce = 2 * (m - 1) * (delay + W / m / B) if W else 0
            sent = [a / (self.compression or 1) for a in (a_in, a_out) if a]
            return max((inner + reduce) / m, sum(delay + a / B for a in sent) / m)
        reduce = 4 * (m - 1) * W / (B * m)
        if first:
            q = self.machines[level - 1] if level else 1
            return (inner + reduce / q) / m
        seconds = (inner + reduce) / m
        if self.compression is not None:
            for sent in (a_in, a_out):
                seconds = max(seconds, 2 * sent / (B * m) / self.compression)
        return seconds

    def time(self, level, plan, seconds=None):
        """`seconds[start, end]` of the stages on one device, where that is not their compute."""

        def inner(start, end, inside):
            if inside is not None:
                return self.time(level - 1, inside, seconds)
            return self.compute(end - start) if seconds is None else seconds[start, end]

        return max(
            self.stage(level, start, end, replicas, inner(start, end, inside), index == 0)
            for index, (start, end, replicas, inside) in enumerate(plan)
        )

    def within(self, plan, schedule, memory, recompute="never", states=0, zero="never"):
        """The bytes on the fullest worker, and the seconds of each stage on one device.

        None where a stage does not fit in `memory`, of all or of each stage's devices. With `auto`
        one that does not do so plain may do its forward pass again; with `always` all do but the
        last. Likewise `zero`: its replicas may divide the `states`, which is tried first, and
        remains.
        """
        stages, most, seconds = list(flatten(plan)), 0, {}
        for i, (start, end, replicas) in enumerate(stages):
            in_flight = math.ceil(sum(s[2] for s in stages[i:]) / replicas)
            ways = {"never": [False], "auto": [False, True], "always": [True]}[recompute]
            ways = ways if i < len(stages) - 1 else [False]
            parts = {"never": [1], "auto": [1, replicas], "always": [replicas]}[zero]
            tried = [*product(ways[:1], parts), *product(ways[1:], parts[-1:])]
            for again, part in tried:
                copies = states / part + (replicas > 1)  # replicas add gradients up in buckets
                held = self.worker_memory(start, end, in_flight, schedule, again, copies)
                if held <= (memory[i] if isinstance(memory, list) else memory):
                    break
            else:
                return None
            most = max(most, held)
            forward = math.fsum(self.nodes[n].forward_seconds for n in end - start)
            seconds[start, end] = self.compute(end - start) + (forward if again else 0)
        return most, seconds

    def time_on_kinds(self, plan, taken, speeds, limits, schedule, recompute):
        """Infinite where it does not fit. `taken[i]`: the components of the outermost level that
        stage i has; `speeds` and `limits` of each component.
        """
        slowest, smallest = [], []
        for stage, components in zip(plan, taken, strict=True):
            assert len(components) == stage[2]
            inside = len(list(flatten([stage])))
            slowest += [min(speeds[component] for component in components)] * inside
            smallest += [min(limits[component] for component in components)] * inside
        found = self.within(plan, schedule, smallest, recompute)
        if found is None:
            return math.inf
        pairs = zip(found[1].items(), slowest, strict=True)
        seconds = {stage: time / speed for (stage, time), speed in pairs}
        return self.time(len(self.machines) - 1, plan, seconds)

    def worker_memory(self, start, end, in_flight, schedule, again=False, copies=0):
        """Without measured footprints: a node saves its outputs and needs its gradients."""
        stashing = schedule == "weight-stashing"
        weights = self.parameters(end - start)
        held = weights * (1 + copies) + (in_flight - 1) * weights * stashing
        held += (in_flight + 1) * self.read(start, end) + self.across(end)
        held += 0 if again else (in_flight - 1) * self.outputs(end - start)
        inside = [name for name in self.nodes if name in end - start]
        moments = [weights]
        for position, name in enumerate(inside):
            gone = weights if not stashing else self.parameters(inside[position + 1 :])
            kept = self.outputs(inside[: position + 1])
            moments.append(gone + kept + self.parameters([name]))
        return held + max(moments)


def flatten(plan):
    for start, end, replicas, inside in plan:
        if inside is None:
            yield start, end, replicas
        else:
            for inner_start, inner_end, inner_replicas in flatten(inside):
                yield inner_start, inner_end, replicas * inner_replicas


def assignments(replicas, components):
    """Every way to give each stage as many components as it has replicas, none to two."""
    if not replicas:
        yield []
        return
    for first in combinations(sorted(components), replicas[0]):
        for rest in assignments(replicas[1:], set(components) - set(first)):
            yield [first, *rest]


def downsets(graph):
    """Every set of nodes that holds the producers of each of its nodes."""
    found = {frozenset()}
    for name in graph.order:
        inputs = frozenset(graph.predecessors[name])
        found |= {downset | {name} for downset in found if inputs <= downset}
    return sorted(found, key=len)


def every_plan(cuts, machines, straight=False, fewer=False, piece=None):
    """Every nested plan: all chains of nested downsets, all counts of components, at each level."""
    start, end = piece or (frozenset(), cuts[-1])
    yield from _chains(cuts, machines, machines[-1], straight, fewer, start, end)


def _chains(cuts, machines, left, straight, fewer, start, end):
    """Pipelines from `start` to `end` on `left` components of the outermost level (or fewer)."""
    for stop in cuts:
        if not (start < stop <= end):
            continue
        for replicas in range(1, (1 if straight else left) + 1):
            if stop == end:
                tails = [[]] if fewer or replicas == left else []
            elif replicas < left:
                tails = list(_chains(cuts, machines, left - replicas, straight, fewer, stop, end))
            else:
                tails = []
            if not tails:
                continue
            insides = [None]
            if len(machines) > 1:
                insides = list(every_plan(cuts, machines[:-1], straight, fewer, (start, stop)))
            for inside in insides:
                for tail in tails:
                    yield [(start, stop, replicas, inside), *tail]


def working(graph):
    """The graph without its inputs and the `__getitem__`s that nothing consumes."""
    fed = {b for _, b in graph.edges}
    read = {a for a, _ in graph.edges}
    nodes = {
        name: node
        for name, node in graph.nodes.items()
        if not (node.description.startswith("Input") and name not in fed)
        and not (node.description.startswith("__getitem__") and name not in read)
    }
    return Graph(nodes, tuple((a, b) for a, b in graph.edges if a in nodes and b in nodes))


def nest(plan, graph):
    """The nested plan that a plan's ranks stand for, from its stages alone.

    Only the nodes of `graph` count. Checks that each stage has some of them, and the same devices
    in each component of each level.
    """
    places = list(plan.cluster.places())
    stages, before = [], frozenset()
    for stage in plan.stages:
        after = before | (frozenset(stage.nodes) & frozenset(graph.nodes))
        assert before < after
        spots = [places[rank] for rank in stage.ranks]
        axes = [sorted({spot[level] for spot in spots}) for level in range(len(spots[0]))]
        assert len(spots) == len(set(spots)) == math.prod(len(axis) for axis in axes)
        stages.append((before, after, axes))
        before = after
    assert before == frozenset(graph.nodes)
    for source, target in graph.edges:
        assert all(source in end for _, end, _ in stages if target in end), "not a downset"
    return _nest(stages, len(plan.cluster.machines) - 1)


def _nest(stages, level):
    nested, taken = [], set()
    for axis, group in groupby(stages, key=lambda stage: stage[2][level]):
        members = list(group)
        assert not taken & set(axis), "a component is in two stages"
        taken |= set(axis)
        inside = None if level == 0 else _nest(members, level - 1)
        if level == 0:
            assert len(members) == 1
        nested.append((members[0][0], members[-1][1], len(axis), inside))
    return nested


def flat_pipelines(cuts, machines, straight=False, fewer=False):
    """Every flat pipeline: lists of (start, end, devices), each stage's devices numbers in a row.

    A stage has one device, or several whole components of one level within one of the next.
    """
    total = math.prod(machines)

    def grow(start, used):
        if start == cuts[-1] and (fewer or used == total):
            yield []
        for begin in range(used, total if fewer else min(used + 1, total)):
            for count in submeshes(machines, begin, straight):
                for end in cuts:
                    if start < end:
                        for rest in grow(end, begin + count):
                            yield [(start, end, range(begin, begin + count)), *rest]

    yield from grow(frozenset(), 0)


def submeshes(machines, begin, straight):
    """How many devices a stage may have that begins at this one."""
    sizes = [math.prod(machines[:level]) for level in range(len(machines) + 1)]
    for count in range(1, sizes[-1] - begin + 1):
        last = begin + count - 1
        if count == 1 or any(
            begin % inner == count % inner == 0 and begin // outer == last // outer
            for inner, outer in pairwise(sizes)
        ):
            yield count
        if straight:
            return


def flat_times(costs, pipeline, alone):
    """What each stage takes: level by level, with the link at the level that joins it on.

    `alone[start, end]`: on one device.
    """
    times, previous = [], None
    for start, end, devices in pipeline:
        seconds, inner = alone[start, end], 1
        for level, count in enumerate(costs.machines):
            outer = inner * count
            spanned = {device // inner % count for device in devices}
            joins = (
                previous is not None
                and previous // outer == devices[0] // outer
                and previous // inner != devices[0] // inner
            )
            seconds = costs.stage(level, start, end, len(spanned), seconds, not joins)
            inner = outer
        times.append(seconds)
        previous = devices[-1]
    return times


def flat_within(costs, pipeline, *settings):
    """As `Costs.within`, for a flat pipeline."""
    plan = [(start, end, len(devices), None) for start, end, devices in pipeline]
    return costs.within(plan, *settings)
