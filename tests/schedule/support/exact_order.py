"""The shortest round by exhaustion: what an order can be compared with, where it is small."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pipedream.schedule.spec import PassTimes, PipelineSpec

Counts = tuple[tuple[int, int, int], ...]
"""For each stage how many forward passes, gradients of inputs and of weights are done."""

Label = tuple[float, ...]
"""When each place is free, and when what is on its way arrives."""


def shortest_round(spec: PipelineSpec, microbatches: int, most: float) -> float:
    """Returns the seconds from the beginning to the end of the shortest round of a chain of stages,
    if it is at most `most`; infinite otherwise.

    Goes through all counts of passes that are done, each with all ways to come there of which none
    is in everything as early as another (dynamic programming with dominance). Passes of a stage are
    in the order of the microbatches, which are all alike.
    """
    return _Search(spec, microbatches, most).run()


class _Search:
    def __init__(self, spec: PipelineSpec, microbatches: int, most: float) -> None:
        assert spec.links == tuple(pairwise(range(len(spec.replicas))))
        self.spec, self.microbatches, self.most = spec, microbatches, most + 1e-9
        self.times: PassTimes = spec.pass_times
        self.stages = range(len(spec.replicas))

    def run(self) -> float:
        begin: Counts = ((0, 0, 0),) * len(self.stages)
        arrivals: dict[tuple[str, int, int], float] = {}
        states = {begin: [((0.0,) * len(self.spec.places), arrivals)]}
        for _ in range(3 * len(self.stages) * self.microbatches):
            following: dict[Counts, list] = {}
            for counts, labels in states.items():
                for label in labels:
                    for after, reached in self.steps(counts, *label):
                        add(following.setdefault(after, []), reached)
            states = following
        ends = [max(free) for labels in states.values() for free, _ in labels]
        return min(ends, default=float("inf"))

    def steps(self, counts: Counts, free, arrivals) -> Iterator[tuple[Counts, tuple]]:
        for stage in self.stages:
            forward, back, weights = counts[stage]
            place = self.spec.place_of[stage]
            if forward < self.microbatches and self.has_room(counts, stage):
                ready = arrivals.get(("F", stage, forward)) if stage else 0.0
                yield from self.step(counts, free, arrivals, stage, 0, ready)
            if back < forward:
                last = stage == self.stages[-1]
                ready = 0.0 if last else arrivals.get(("B", stage, back))
                yield from self.step(counts, free, arrivals, stage, 1, ready)
            if weights < back:
                yield from self.step(counts, free, arrivals, stage, 2, free[place])

    def has_room(self, counts: Counts, stage: int) -> bool:
        if self.times.limit is None:
            return True
        place, held = self.spec.place_of[stage], self.times.held[stage]
        for own in self.spec.places[place]:
            forward, back, weights = counts[own]
            held += (forward - back) * self.times.held[own]
            held += (back - weights) * self.times.kept[own]
        return held <= self.times.limit[place] + 1e-9

    def step(self, counts: Counts, free, arrivals, stage: int, which: int, ready):
        if ready is None:
            return
        place, b = self.spec.place_of[stage], counts[stage][which]
        seconds = (self.times.forward, self.times.backward_input, self.times.backward_weight)
        end = max(free[place], ready) + seconds[which][stage]
        done = [list(each) for each in counts]
        done[stage][which] += 1
        after = tuple(map(tuple, done))
        left = sum(
            (self.microbatches - after[own][k]) * seconds[k][own]
            for own in self.spec.places[place]
            for k in range(3)
        )
        if end + left > self.most:
            return
        coming = dict(arrivals)
        if which == 0:
            coming.pop(("F", stage, b), None)
            if stage < self.stages[-1]:
                link = stage, stage + 1
                coming["F", stage + 1, b] = end + self.spec.delay(link, is_gradient=False)
        elif which == 1:
            coming.pop(("B", stage, b), None)
            if stage:
                link = stage - 1, stage
                coming["B", stage - 1, b] = end + self.spec.delay(link, is_gradient=True)
        yield after, (tuple(end if at == place else t for at, t in enumerate(free)), coming)


def add(labels: list, label: tuple) -> None:
    """Adds a label unless another is as early in everything; removes those that it makes idle."""
    if any(is_as_early(other, label) for other in labels):
        return
    labels[:] = [other for other in labels if not is_as_early(label, other)]
    labels.append(label)


def is_as_early(one: tuple, other: tuple) -> bool:
    free = all(a <= b + 1e-12 for a, b in zip(one[0], other[0], strict=True))
    return free and all(one[1][key] <= other[1][key] + 1e-12 for key in one[1])
