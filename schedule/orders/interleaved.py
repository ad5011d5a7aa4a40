"""Interleaved 1F1B: a rank has several stages, p apart, and a bubble as many times smaller.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021, section 2.2. Microbatches go in groups of p: all of a group through one stage of a place,
then through its next one. Two places, four stages, four microbatches, as stage F or B microbatch:

    0F0 0F1 2F0 2F1 .   2B0 0F2 2B1 0F3 ...
    .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipedream.schedule.action import Kind
from pipedream.schedule.orders.passes import Pass, Round
from pipedream.schedule.spec import PipelineSpec


def interleaved(spec: PipelineSpec, microbatches: int) -> Round:
    """Needs the rank map `loop`; with one stage on each rank it is 1F1B.

    The last group may lack microbatches: its order is that of a whole one, without them. What
    cannot deadlock cannot do so with passes left out.
    """
    places = spec.places
    ranks = len(places)
    whole = -(-microbatches // ranks) * ranks
    return [
        [each for each in _place(stages, ranks, whole) if each.microbatch < microbatches]
        for stages in places
    ]


def _place(stages: Sequence[int], ranks: int, microbatches: int) -> Iterator[Pass]:
    total = microbatches * len(stages)
    behind = ranks - stages[0] - 1
    warm_up = min(2 * behind + (len(stages) - 1) * ranks if len(stages) > 1 else behind, total)
    forward = _direction(Kind.FORWARD, stages, ranks, microbatches)
    backward = _direction(Kind.BACKWARD, stages[::-1], ranks, microbatches)
    for _ in range(warm_up):
        yield next(forward)
    for _ in range(total - warm_up):
        yield next(forward)
        yield next(backward)
    yield from backward


def _direction(kind: Kind, stages: Sequence[int], ranks: int, microbatches: int) -> Iterator[Pass]:
    for group in range(0, microbatches, ranks):
        for stage in stages:
            for b in range(group, group + ranks):
                yield Pass(stage, kind, b)
