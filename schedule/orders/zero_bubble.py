"""Backward passes in two halves, one stage on each rank: ZB-H1 and ZB-H2.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2. Of p places and
passes F, B and W, number i has

| | forward passes before the first backward pass | W behind B by | in flight | bubble |
|---|---|---|---|---|
| 1F1B | p - i | 0 | p - i | (p - 1) (F + B + W) |
| ZB-H1 | p - i | i | p | (p - 1) (F + B - W) |
| ZB-H2 | 2 (p - i) - 1 | 2 i | 2 p - 1 | (p - 1) (F + B - 2 W) |

The bubble, of one place from its first pass to its last, is that where W is at most F and B.

ZB-H1, p = 3, in units of time; . is idle:

    F0 F1 F2 .  .  B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4
    .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4
    .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4
"""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.schedule.action import Kind
from pipedream.schedule.orders.passes import Pass, Round
from pipedream.schedule.spec import PipelineSpec


def zb_h1(spec: PipelineSpec, microbatches: int) -> Round:
    """Makes an order with the peak of 1F1B, and about a third of its bubble."""
    return _with_weights_behind(spec, microbatches, 1)


def zb_h2(spec: PipelineSpec, microbatches: int) -> Round:
    """Makes an order without a bubble where passes are alike, with twice as many in flight."""
    return _with_weights_behind(spec, microbatches, 2)


def _with_weights_behind(spec: PipelineSpec, microbatches: int, by: int) -> Round:
    """Makes the order in which on each place W is `by` more behind B than on the place before."""
    last = len(spec.places) - 1
    return [
        list(_one_by_one(i, microbatches, warm_up=by * (last - i) + 1, behind=by * i))
        for i in range(last + 1)
    ]


def _one_by_one(stage: int, microbatches: int, warm_up: int, behind: int) -> Iterator[Pass]:
    for b in range(min(warm_up, microbatches)):
        yield Pass(stage, Kind.FORWARD, b)
    for b in range(microbatches):
        yield Pass(stage, Kind.BACKWARD_INPUT, b)
        if b >= behind:
            yield Pass(stage, Kind.BACKWARD_WEIGHT, b - behind)
        if b + warm_up < microbatches:
            yield Pass(stage, Kind.FORWARD, b + warm_up)
    for b in range(max(0, microbatches - behind), microbatches):
        yield Pass(stage, Kind.BACKWARD_WEIGHT, b)
