"""Steps and their costs beside sets of elements, cheapest sequences beside all sequences."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import numpy as np
import pytest
from amount import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sharded import (
    agree,
    held_ids,
    hold,
    mesh_tensor,
    placed,
    run_steps,
    straight_steps,
)

from pipedream.graph.cluster import Cluster, Link
from pipedream.graph.placements.placement import (
    Mesh,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    axis_groups,
    parse_placements,
    show_placements,
)
from pipedream.sharding.assignment import LinkedMesh
from pipedream.sharding.redistribution import redistribute
from pipedream.sharding.steps import Collective, MeshTensor, Step, make_step, steps_from

LINK = Link(bandwidth=1e9)


def named(steps: tuple[Step, ...]) -> list[str]:
    return [
        f"{each.collective.value} {each.axis}: {show_placements(each.target)}" for each in steps
    ]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("S(0),R", "S(0),R", []),
        ("S(0),R", "R,R", ["all-gather 0: R,R"]),
        ("R,R", "S(0),S(0)", ["slice 0: S(0),R", "slice 1: S(0),S(0)"]),
        ("S(0),S(0)", "R,R", ["all-gather 1: S(0),R", "all-gather 0: R,R"]),
        ("S(0),R", "S(1),R", ["all-to-all 0: S(1),R"]),
        ("S(0),R", "S(0,chunks=2),R", ["all-to-all 0: S(0, chunks=2),R"]),
        ("P,R", "R,R", ["all-reduce 0: R,R"]),
        ("P,R", "S(1),R", ["reduce-scatter 0: S(1),R"]),
        ("P,R", "R,S(1)", ["slice 1: P,S(1)", "all-reduce 0: R,S(1)"]),
        ("R,R", "P,R", ["keep-one 0: P,R"]),
        ("S(0),R", "P,R", ["zero-pad 0: P,R"]),
        (
            "S(0),S(0)",
            "S(1),S(0)",
            ["all-gather 1: S(0),R", "all-to-all 0: S(1),R", "slice 1: S(1),S(0)"],
        ),
        (
            "R,S(0)",
            "S(0),S(0)",
            ["zero-pad 1: R,P", "slice 0: S(0),P", "reduce-scatter 1: S(0),S(0)"],
        ),
    ],
)
def test_what_is_done(source: str, target: str, expected: list[str]) -> None:
    tensor = mesh_tensor((8, 8), 4, (2, 2), LINK)
    steps = redistribute(tensor, parse_placements(source), parse_placements(target))
    assert named(steps) == expected


def test_a_dimension_is_sliced_elsewhere_before_it_is_gathered() -> None:
    """So less is gathered, and slicing costs nothing."""
    tensor = mesh_tensor((8, 8), 4, (2, 2), LINK)
    steps = redistribute(tensor, parse_placements("S(0),R"), parse_placements("R,S(1)"))
    assert named(steps) == ["slice 1: S(0),S(1)", "all-gather 0: R,S(1)"]
    assert [step.bytes for step in steps] == [0, 4 * 4 * 4]


def test_the_faster_axis_carries_more() -> None:
    """The slow one adds up only the half that the fast one has scattered."""
    fast, slow = Link(bandwidth=1e10), Link(bandwidth=1e9)
    tensor = MeshTensor((8, 8), 4, (2, 2), (slow, fast))
    steps = redistribute(tensor, parse_placements("P,P"), parse_placements("R,R"))
    expected = ["reduce-scatter 1: P,S(0)", "all-reduce 0: R,S(0)", "all-gather 1: R,R"]
    assert named(steps) == expected


def test_latency_counts_for_each_round() -> None:
    link = Link(latency=1e-3, bandwidth=1e6)
    tensor = mesh_tensor((8,), 4, (4,), link)
    gather = make_step(tensor, (Shard(0),), 0, Replicate())
    reduced = make_step(tensor, (Partial(),), 0, Replicate())
    assert gather is not None
    assert reduced is not None
    assert (gather.bytes, reduced.bytes) == (24, 48)
    assert math.isclose(gather.seconds, 3 * (1e-3 + 8e-6))
    assert math.isclose(reduced.seconds, 6 * (1e-3 + 8e-6))


@pytest.mark.parametrize(
    ("source", "axis", "placement"),
    [("S(0),S(0)", 0, Replicate()), ("S(0),S(0)", 0, Shard(1)), ("R,S(0)", 0, Shard(0))],
)
def test_only_the_last_axis_of_a_dimension_is_changed(
    source: str, axis: int, placement: Placement
) -> None:
    tensor = mesh_tensor((8, 8), 4, (2, 2), LINK)
    assert make_step(tensor, parse_placements(source), axis, placement) is None


def test_an_axis_of_one_device_is_in_nobodys_way() -> None:
    tensor = mesh_tensor((8,), 4, (2, 1), LINK)
    step = make_step(tensor, (Shard(0), Shard(0)), 0, Replicate())
    assert step is not None
    assert step.bytes == 4 * 4


def every_choice(shape: tuple[int, ...], chunks: Iterable[int] = (1, 2)) -> list[Placement]:
    shards = [Shard(dim, each) for dim in range(len(shape)) for each in chunks]
    return [Replicate(), Partial(), *shards]


def counted_bytes(shape: tuple[int, ...], mesh: Mesh, step: Step) -> int:
    """What the busiest device sends or receives, by counting elements on each."""
    busiest = 0
    for group in axis_groups(mesh, step.axis):
        before = [set(held_ids(shape, mesh, step.source, device)) for device in group]
        after = [set(held_ids(shape, mesh, step.target, device)) for device in group]
        others = len(group) - 1
        for old, new in zip(before, after, strict=True):
            busiest = max(
                busiest,
                {
                    Collective.ALL_GATHER: others * len(old),
                    Collective.REDUCE_SCATTER: others * len(new),
                    Collective.ALL_REDUCE: 2 * others * -(-len(old) // len(group)),
                    Collective.ALL_TO_ALL: max(len(old - new), len(new - old)),
                }.get(step.collective, 0),
            )
    return busiest


@settings(max_examples=examples(200))
@given(placed())
def test_every_step_stays_in_its_group_and_has_the_bytes_counted(
    case: tuple[tuple[int, ...], Mesh, tuple[Placements, ...]],
) -> None:
    shape, mesh, (source,) = case
    tensor = mesh_tensor(shape, 1, mesh, LINK)
    for step in steps_from(tensor, source, every_choice(shape, (1, 3))):
        assert step.bytes == counted_bytes(shape, mesh, step), step
        for group in axis_groups(mesh, step.axis):
            held = set().union(*(held_ids(shape, mesh, source, device) for device in group))
            for device in group:
                needed = set(held_ids(shape, mesh, step.target, device))
                assert needed <= held or step.target[step.axis] == Partial(), step


@given(
    st.sampled_from(((2, 2), (2, 3), (2, 2, 2))),
    st.tuples(*[st.sampled_from((Replicate(), Partial(), Shard(0), Shard(1)))] * 3),
)
def test_no_step_is_forgotten(mesh: Mesh, placements: Placements) -> None:
    """What is no step needs elements that the group does not hold, unless parts are so small that
    they coincide: here none are.
    """
    shape, source = (24, 24), placements[: len(mesh)]
    tensor = mesh_tensor(shape, 1, mesh, LINK)
    for axis in range(len(mesh)):
        for placement in every_choice(shape, (1,)):
            target = (*source[:axis], placement, *source[axis + 1 :])
            if placement in (source[axis], Partial()) or make_step(tensor, source, axis, placement):
                continue
            groups = axis_groups(mesh, axis)
            held = [
                set().union(*(held_ids(shape, mesh, source, device) for device in group))
                for group in groups
            ]
            assert not all(
                set(held_ids(shape, mesh, target, device)) <= own
                for group, own in zip(groups, held, strict=True)
                for device in group
            )


@settings(max_examples=examples(150), deadline=None)
@example(  # chunks of the one dimension on the way along the other
    ((2, 2), (1, 4), ((Shard(0), Shard(0, 2)), (Replicate(), Shard(0)))), True
)
@given(placed(((2,), (4,), (2, 2), (1, 4), (2, 3), (3, 2)), ways=2), st.booleans())
def test_no_sequence_is_cheaper(
    case: tuple[tuple[int, ...], Mesh, tuple[Placements, ...]], slow: bool
) -> None:
    """All sequences of up to six steps, through all placements, partial ones among them."""
    shape, mesh, (source, target) = case
    links = [LINK, Link(latency=1e-9, bandwidth=1e8 if slow else 1e9)]
    tensor = MeshTensor(shape, 4, mesh, tuple(links[: len(mesh)]))
    steps = redistribute(tensor, source, target)
    found = sum(step.seconds for step in steps)
    assert math.isclose(found, cheapest(tensor, source, target, 6), rel_tol=1e-9, abs_tol=1e-18)
    assert [step.source for step in steps] == [source, *(step.target for step in steps)][:-1]
    assert not steps or steps[-1].target == target


def cheapest(tensor: MeshTensor, source: Placements, target: Placements, longest: int) -> float:
    """Seconds of the cheapest of all sequences of up to so many steps."""
    chunks = {each.chunks for each in (*source, *target) if isinstance(each, Shard)} | {1}
    choices = every_choice(tensor.shape, sorted(chunks))
    edges: dict[Placements, list[Step]] = {}
    reached = {source: 0.0}
    for _ in range(longest):
        further = dict(reached)
        for placements, seconds in reached.items():
            if placements not in edges:
                edges[placements] = list(steps_from(tensor, placements, choices))
            for step in edges[placements]:
                there = seconds + step.seconds
                further[step.target] = min(there, further.get(step.target, math.inf))
        if further == reached:
            break
        reached = further
    return reached[target]


@settings(max_examples=examples(200), deadline=None)
@given(placed(ways=2), st.randoms(use_true_random=False))
def test_the_steps_lead_to_the_target(
    case: tuple[tuple[int, ...], Mesh, tuple[Placements, ...]], rng: random.Random
) -> None:
    """Executed on arrays, without processes; no more bytes than to replicate and slice."""
    shape, mesh, (source, target) = case
    tensor = mesh_tensor(shape, 8, mesh, LINK)
    array = np.random.default_rng(rng.getrandbits(32)).integers(-99, 99, shape).astype(float)
    steps = redistribute(tensor, source, target)
    held = run_steps(shape, mesh, steps, hold(array, mesh, source, rng))
    assert agree(held, array, mesh, target)
    straight = straight_steps(tensor, source, target)
    assert sum(step.bytes for step in steps) <= sum(step.bytes for step in straight)


def test_what_an_all_gather_measured_is_what_one_on_a_mesh_is_taken_to_take() -> None:
    """Four devices gather a vector. Once it took steps of an all-reduce of gradients, by which the
    devices of one machine were thought to need three times what they do.
    """
    points = ((1e3, 1e-4), (1e6, 5e-3), (1e8, 0.2))
    ring = Link(latency=1.0, bandwidth=1e6)
    for gather in (Link(points=points), Link(latency=1e-4, bandwidth=1e8)):
        cluster = Cluster(machines=(4,), bandwidth=(1e9,), all_reduce=(ring,), all_gather=(gather,))
        linked = LinkedMesh.of((4,), range(4), cluster)
        for count in (1000, 250_000, 10_000_000):
            vector = MeshTensor((count,), 4, linked.sizes, linked.links)
            step = make_step(vector, (Shard(0),), 0, Replicate())
            assert step is not None
            assert step.seconds == pytest.approx(gather.seconds(4 * count))
    alone = Cluster(machines=(4,), bandwidth=(1e9,), all_reduce=(ring,))
    assert alone.mesh_link(1, 4) == alone.ring_link(1)


def test_two_of_four_devices_wait_as_long_as_four() -> None:
    """Once two took a third of the latency, one step of three, and a mesh of 2 x 2 took 15 % longer
    than planned.
    """
    gather = Link(latency=3e-3, bandwidth=1e8)
    cluster = Cluster(machines=(4,), bandwidth=(1e9,), all_gather=(gather,))
    linked = LinkedMesh.of((2, 2), range(4), cluster)
    vector = MeshTensor((1_000_000,), 4, linked.sizes, linked.links)
    step = make_step(vector, (Replicate(), Shard(0)), 1, Replicate())
    assert step is not None
    assert step.bytes == 2_000_000
    assert step.seconds == pytest.approx(3e-3 + 2_000_000 / (0.75 * 1e8))


def test_placements_that_do_not_fit_are_refused() -> None:
    tensor = mesh_tensor((8,), 4, (2,), LINK)
    with pytest.raises(ValueError, match="8 elements of dimension 0 are not 3 equal chunks"):
        redistribute(tensor, (Replicate(),), (Shard(0, chunks=3),))
