"""Gradients of redistributions: the steps beside a table, and their values beside what the whole
tensor's gradient is.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from sharded import agree, hold, placed, run_steps

from pipedream.graph.cluster import Link
from pipedream.graph.sharding.adjoint import ADJOINTS, adjoint
from pipedream.graph.sharding.notation import parse_placements, show_placements
from pipedream.graph.sharding.placement import Mesh, Partial, Placements, Replicate, Shard
from pipedream.graph.sharding.redistribution import redistribute
from pipedream.graph.sharding.steps import MeshTensor, make_step

LINK = Link(bandwidth=1e9)


@pytest.mark.parametrize(
    ("source", "target", "gradient", "expected"),
    [
        ("S(0)", "R", "R", "slice S(0)"),
        ("S(0)", "R", "P", "reduce-scatter S(0)"),
        ("R", "S(0)", "S(0)", "all-gather R"),
        ("S(0)", "S(1)", "S(1)", "all-to-all S(0)"),
        ("S(0)", "S(0,chunks=2)", "S(0,chunks=2)", "all-to-all S(0)"),
        ("P", "S(0)", "S(0)", "all-gather R"),
        ("P", "R", "R", ""),
        ("P", "R", "P", "all-reduce R"),
        ("R", "P", "R", ""),
        ("S(0)", "P", "R", "slice S(0)"),
    ],
)
def test_each_pair(source: str, target: str, gradient: str, expected: str) -> None:
    tensor = MeshTensor.of((8, 8), 4, (2,), LINK)
    (before,), (after,) = parse_placements(source), parse_placements(target)
    step = make_step(tensor, (before,), 0, after)
    assert step is not None
    backward = adjoint(tensor, (step,), parse_placements(gradient))
    assert " ".join(f"{s.collective.value} {show_placements(s.target)}" for s in backward) == (
        expected
    )


def test_the_table_has_every_pair() -> None:
    """A gradient is sharded as its value; of a sum it is replicated; else it is either."""
    tensor = MeshTensor.of((8, 8), 4, (2,), LINK)
    kinds = (Replicate(), Partial(), Shard(0), Shard(1))
    pairs = set()
    for before in kinds:
        for after in kinds:
            step = make_step(tensor, (before,), 0, after)
            gradients = {Shard: [Shard], Partial: [Replicate]}.get(
                type(after), [Replicate, Partial]
            )
            if step is not None:
                pairs |= {(step.collective, gradient) for gradient in gradients}
    assert pairs == set(ADJOINTS)


def test_a_partial_gradient_stays_where_there_was_no_step() -> None:
    tensor = MeshTensor.of((8, 8), 4, (2, 2), LINK)
    steps = redistribute(tensor, parse_placements("R,S(0)"), parse_placements("R,R"))
    backward = adjoint(tensor, steps, parse_placements("P,P"))
    assert [show_placements(step.target) for step in backward] == ["P,S(0)"]
    assert adjoint(tensor, (), parse_placements("P,R")) == ()


def test_the_gradient_of_a_sum_is_not_added_up() -> None:
    """Of f(x0 + x1) by both terms, by differences: on each device, what f has by the sum."""

    def loss(terms: np.ndarray) -> float:
        return float((terms.sum(0) ** 2).sum())

    terms, step = np.arange(6.0).reshape(2, 3), 1e-6
    of_sum = 2 * terms.sum(0)
    for index in np.ndindex(terms.shape):
        moved = terms.copy()
        moved[index] += step
        assert (loss(moved) - loss(terms)) / step == pytest.approx(of_sum[index[1]], abs=1e-4)
    tensor = MeshTensor.of((3,), 8, (2,), LINK)
    steps = redistribute(tensor, (Partial(),), (Replicate(),))
    backward = adjoint(tensor, steps, (Replicate(),))
    for held in run_steps((3,), (2,), backward, [of_sum, of_sum]):
        assert (held == of_sum).all()


@settings(max_examples=200, deadline=None)
@given(case=placed(ways=2), rng=...)
def test_the_gradient_of_what_went_in_is_that_of_what_came_out(
    case: tuple[tuple[int, ...], Mesh, tuple[Placements, ...]], rng: random.Random
) -> None:
    """A redistribution changes no element of the whole tensor, so the whole gradient stays too."""
    shape, mesh, (source, target) = case
    tensor = MeshTensor.of(shape, 8, mesh, LINK)
    steps = redistribute(tensor, source, target)
    replicated = rng.choice((Replicate(), Partial()))
    gradient = tuple(
        {Shard: placement, Partial: Replicate()}.get(type(placement), replicated)
        for placement in target
    )
    array = np.random.default_rng(rng.getrandbits(32)).integers(-99, 99, shape).astype(float)
    backward = adjoint(tensor, steps, gradient)
    held = run_steps(shape, mesh, backward, hold(array, mesh, gradient, rng))
    placed_as = backward[-1].target if backward else gradient
    assert agree(held, array, mesh, placed_as)
    for value, its in zip(source, placed_as, strict=True):
        assert its == value if isinstance(value, Shard) else not isinstance(its, Shard)
        assert value != Partial() or its == Replicate()
