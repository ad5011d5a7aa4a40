"""Two stages on each rank in the shape of a V, backward passes in halves: ZB-V, V-Half, V-Min.

Place i of p has stages i and 2p - 1 - i. Qi, Wan, Amar, Lin, "Pipeline Parallelism with
Controllable Memory", 2024 (2405.15362), section 3, and for ZB-V Qi, Wan, Huang, Lin, "Zero Bubble
Pipeline Parallelism", ICLR 2024, section 6. In units of passes, all as long:

| | microbatches of activations, of both stages | bubble |
|---|---|---|
| ZB-V | p | none from 2 p microbatches on |
| V-Half | (p + 2) // 2 | about half of that of 1F1B |
| V-Min | (p + 4) // 3 | about that of 1F1B |

V-Half and V-Min repeat a building block every six units: the forward and backward passes of a
microbatch begin at offsets that grow by as much from one place to the next, so that a place never
has two at once. Offsets that grow slowly keep activations for a short time. The gradients of the
weights fill what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import TypeAlias

from pipedream.schedule.action import Kind
from pipedream.schedule.orders.deferred import deferred
from pipedream.schedule.orders.passes import Pass, Round
from pipedream.schedule.spec import PipelineSpec

_UNITS = 6
"""Forward and backward pass, in halves, of two stages."""

_Steps: TypeAlias = tuple[int, int, int, int]
"""By how much the offsets grow from place to place: of the forward pass of the first stage, that of
the second, and of their backward passes in the order in which a microbatch comes to them."""


def zb_v(spec: PipelineSpec, microbatches: int) -> Round:
    """Makes an order with the peak of 1F1B, and no bubble where all passes are alike."""
    places = len(spec.places)
    halves = [list(_zb_v(place, places, microbatches)) for place in range(places)]
    return _filled(spec, halves, microbatches=places)


def v_half(spec: PipelineSpec, microbatches: int) -> Round:
    """Makes an order with half of the activations of 1F1B."""
    most = (len(spec.places) + 2) // 2
    return _filled(spec, _repeated(len(spec.places), microbatches, (2, 1, 2, 1)), most)


def v_min(spec: PipelineSpec, microbatches: int) -> Round:
    """Makes an order with a third of the activations of 1F1B."""
    most = (len(spec.places) + 4) // 3
    return _filled(spec, _repeated(len(spec.places), microbatches, (1, 1, 1, 1)), most)


def _filled(spec: PipelineSpec, halves: Round, microbatches: int) -> Round:
    """Adds the gradients of weights as if all passes were as long, whatever they take."""
    order = deferred(replace(spec, times=None), halves, [2.0 * microbatches] * len(halves))
    assert order is not None, "no room for the order's own passes"
    return order


def _zb_v(place: int, places: int, microbatches: int) -> Iterator[Pass]:
    """Yields forward passes of the first stage until the first microbatch comes back; then those of
    the second stage as well; then backward and forward passes of both stages in turn.
    """
    first, second = place, 2 * places - 1 - place
    passes = {
        (stage, kind): iter([Pass(stage, kind, b) for b in range(microbatches)])
        for stage in (first, second)
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT)
    }
    into, on = (first, Kind.FORWARD), (second, Kind.FORWARD)
    back, out = (second, Kind.BACKWARD_INPUT), (first, Kind.BACKWARD_INPUT)
    turns = [into] * (2 * (places - place) - 1) + [on, into] * place + [on, back] * (places - place)
    for turn in turns + [into, out, on, back] * (microbatches + places):
        yield from (each for each in (next(passes[turn], None),) if each is not None)


def _repeated(places: int, microbatches: int, steps: _Steps) -> Round:
    offsets = _offsets(places, steps)
    return [
        [each for _, each in sorted(_block(place, places, microbatches, offsets[place]))]
        for place in range(places)
    ]


def _block(
    place: int, places: int, microbatches: int, offsets: Sequence[int]
) -> Iterator[tuple[int, Pass]]:
    first, second = place, 2 * places - 1 - place
    stages = (first, second, second, first)
    kinds = (Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_INPUT)
    for b in range(microbatches):
        for stage, kind, offset in zip(stages, kinds, offsets, strict=True):
            yield offset + _UNITS * b, Pass(stage, kind, b)


def _offsets(places: int, steps: _Steps) -> list[tuple[int, ...]]:
    """Returns when the passes of microbatch 0 begin at each place: early, and free of others."""
    chosen = [[steps[0] * place for place in range(places)]]
    for turn, step in enumerate(steps[1:], start=1):
        first = 0 if turn % 2 == 0 else places - 1
        hops = [abs(place - first) for place in range(places)]
        begin = chosen[-1][first] + 1
        chosen.append(
            next(
                row
                for offset in count(begin)
                if _is_free(row := [offset + step * hop for hop in hops], chosen)
            )
        )
    return list(zip(*chosen, strict=True))


def _is_free(row: Sequence[int], chosen: Sequence[Sequence[int]]) -> bool:
    return all(
        (one - other) % _UNITS for others in chosen for one, other in zip(row, others, strict=True)
    )
