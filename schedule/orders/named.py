"""The orders of a round with a flush, by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from pipedream.schedule.orders.auto import auto
from pipedream.schedule.orders.literature import LITERATURE, RoundOrder, loop, vee
from pipedream.schedule.orders.passes import Round, peaks, whole_where_nothing_waits
from pipedream.schedule.spec import PipelineSpec

ROUND_ORDERS: Mapping[str, RoundOrder] = {
    **LITERATURE,
    "auto": RoundOrder(auto, (1, 2, 3, 4), (loop, vee)),
}


@lru_cache(maxsize=64)
def round_of(spec: PipelineSpec, microbatches: int) -> Round:
    """Returns a round of so many microbatches in the order that the spec names.

    One that is shorter than others, such as the last of an epoch, has their order, with passes left
    out: it cannot deadlock where they do not, and holds no more at any moment.
    """
    whole = _whole_round(spec)
    if microbatches == _in_whole_round(spec):
        return whole
    return [[pass_ for pass_ in passes if pass_.microbatch < microbatches] for passes in whole]


@lru_cache(maxsize=16)
def _whole_round(spec: PipelineSpec) -> Round:
    order = ROUND_ORDERS[spec.order].make(spec, _in_whole_round(spec))
    return whole_where_nothing_waits(spec, order)


def _in_whole_round(spec: PipelineSpec) -> int:
    """Returns how many microbatches a worker has in a round, at most."""
    return -(-spec.microbatches // spec.replicas[0])


def most_in_flight(spec: PipelineSpec) -> tuple[int, ...]:
    """Returns the most microbatches that a worker of each stage has in flight."""
    return peaks(_whole_round(spec), len(spec.replicas))
