"""What a device takes of an operator: measured ratios, else the largest part."""

from __future__ import annotations

import pytest

from pipedream.graph.placements.operators import Input, Operator, TensorType, TimedOperator
from pipedream.graph.placements.placement import Mesh, Partial, Replicate, Shard
from pipedream.sharding.local_times import LocalTimes
from pipedream.sharding.rules import strategies
from pipedream.sharding.rules.strategy import Strategy

R, P = Replicate(), Partial()
ROWS = Strategy((Shard(0), R), (Shard(0),))
COLUMNS = Strategy((R, Shard(1)), (Shard(1),))
INNER = Strategy((Shard(1), Shard(0)), (P,))
TERMS = Strategy((P, R), (P,))
WHOLE = Strategy((R, R), (R,))


def product(rows: int, inner: int, columns: int) -> Operator:
    def tensor(*shape: int) -> TensorType:
        return TensorType(shape=shape, dtype="float32", element_bytes=4)

    return Operator(
        target="aten.mm.default",
        arguments=(Input(input=0), Input(input=1)),
        inputs=(tensor(rows, inner), tensor(inner, columns)),
        outputs=(tensor(rows, columns),),
    )


def test_the_strategies_here_are_those_of_a_product() -> None:
    assert {ROWS, COLUMNS, INNER, TERMS, WHOLE} <= set(strategies(product(8, 8, 8), 2))


@pytest.mark.parametrize(
    ("chosen", "mesh", "share"),
    [
        ((WHOLE,), (4,), 1.0),
        ((TERMS,), (4,), 1.0),
        ((ROWS,), (4,), 3 / 9),
        ((COLUMNS,), (2,), 4 / 7),
        ((INNER,), (4,), 2 / 8),
        ((ROWS, COLUMNS), (2, 2), 5 / 9 * 4 / 7),
        ((ROWS, ROWS), (2, 2), 3 / 9),
        ((ROWS, TERMS), (2, 2), 5 / 9),
        ((ROWS,), (2, 8), 5 / 9),
        ((), (2,), 1.0),
    ],
)
def test_without_times_it_is_the_largest_part(
    chosen: tuple[Strategy, ...], mesh: Mesh, share: float
) -> None:
    assert LocalTimes().share(product(9, 8, 7), chosen, mesh) == pytest.approx(share)


def times(*timed: tuple[Operator, float]) -> LocalTimes:
    return LocalTimes.of(TimedOperator(operator=each, seconds=own) for each, own in timed)


def test_measured_ratios_count_where_both_are_known() -> None:
    whole, half = product(8, 8, 8), product(4, 8, 8)
    known = times((whole, 2.0), (half, 1.5), (product(8, 8, 4), 0.1))
    assert known.share(whole, (ROWS,), (2,)) == 0.75
    assert known.share(whole, (COLUMNS,), (2,)) == 0.05
    assert known.share(whole, (INNER,), (2,)) == 0.5, "not timed"
    assert not known.is_timed(whole, (INNER,), (2,))
    assert known.share(whole, (INNER,), (4,)) == 0.25, "nor is its half"
    assert known.share(whole, (TERMS,), (2,)) == 1.0, "what all devices do takes what it takes"
    assert times((half, 1.5)).share(whole, (ROWS,), (2,)) == 0.5, "of the whole nothing is known"
    assert times((whole, 0.0), (half, 1.5)).share(whole, (ROWS,), (2,)) == 0.5, "no ratio to zero"


def test_both_axes_lead_to_one_local_operator() -> None:
    whole, quarter = product(8, 8, 8), product(4, 8, 4)
    known = times((whole, 2.0), (quarter, 0.7))
    assert known.share(whole, (ROWS, COLUMNS), (2, 2)) == 0.35
    assert known.share(whole, (COLUMNS, ROWS), (2, 2)) == 0.35


def test_the_slowest_device_has_the_largest_part() -> None:
    whole = product(9, 8, 8)
    known = times((whole, 9.0), (product(5, 8, 8), 6.0), (product(4, 8, 8), 1.0))
    assert known.share(whole, (ROWS,), (2,)) == pytest.approx(6 / 9)


def test_what_does_not_divide_in_two_does_not_divide_further() -> None:
    """The half by rows takes a quarter of the whole more than its part; that by columns less."""
    whole = product(16, 16, 16)
    known = times((whole, 2.0), (product(8, 16, 16), 1.5), (product(16, 16, 8), 0.8))
    assert known.share(whole, (ROWS,), (4,)) == 0.25 + 0.25
    assert known.share(whole, (ROWS,), (8,)) == 0.125 + 0.25
    assert known.share(whole, (COLUMNS,), (4,)) == pytest.approx(0.25 * 0.8)
    assert known.share(whole, (ROWS, COLUMNS), (2, 2)) == 0.25 + 0.25
    assert known.share(whole, (COLUMNS, INNER), (2, 2)) == pytest.approx(0.25 * 0.8)
    assert known.share(whole, (ROWS, WHOLE), (2, 2)) == 0.75, "that is the half itself"
