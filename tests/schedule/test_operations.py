"""What ranks begin together: in one order, on communicators that are used, and none hangs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
from nccl_replay import Gpu, hangs
from pipelines import Orders
from schedules import ORDERS

from pipedream.schedule.operations import RankOperations, disorder
from pipedream.schedule.schedule import Schedule
from pipedream.schedule.spec import PassTimes, PipelineSpec

UNIFORM = ("flush", "gpipe", "2bw")
MOST = 31


def links(stages: int, skips: bool) -> tuple[tuple[int, int], ...]:
    chain = {(stage, stage + 1) for stage in range(stages - 1)}
    return tuple(sorted(chain | {(0, target) for target in range(2, stages)} if skips else chain))


def made(spec: PipelineSpec, minibatches: int, ranks: Sequence[Sequence[int]]) -> Orders:
    return Orders.made(Schedule(spec, minibatches), ranks)


def straight() -> Iterator[Callable[[], Orders]]:
    """A stage on each rank."""
    shapes = [(1, 1), (1,) * 4, (1,) * 8, (2, 1), (1, 2, 1), (3, 2), (2, 3, 1), (4, 4)]
    names = ("weight-stashing", "vertical-sync", *UNIFORM)
    for replicas, skips, name in itertools.product(shapes, (False, True), names):
        for norm in (False, True) if name in UNIFORM else (False,):
            spec = PipelineSpec(
                name,
                replicas,
                links(len(replicas), skips),
                5 if name in UNIFORM else 1,
                joint_norm=norm,
            )
            first = itertools.accumulate(replicas, initial=0)
            ranks = [range(begin, begin + own) for begin, own in zip(first, replicas, strict=False)]
            yield partial(made, spec, 17, ranks)


def several() -> Iterator[Callable[[], Orders]]:
    """Several stages on a rank, or backward passes in halves."""
    for order, places, replicas, norm, skips, count in itertools.product(
        ORDERS, (2, 3, 4), (1, 2, 3), (False, True), (False, True), (4, 5)
    ):
        if order == "auto" and (places > 2 or skips):
            continue  # a search that takes long
        rank_map, each = ORDERS[order]
        stages = places * each
        own = tuple(rank_map(places, each))
        ways = links(stages, skips)
        times = PassTimes.unit(stages, len(ways)) if order == "auto" else None
        spec = PipelineSpec(
            "flush",
            (replicas,) * stages,
            ways,
            count,
            order=order,
            rank_map=own,
            times=times,
            joint_norm=norm,
        )
        ranks = [[replicas * place + k for k in range(replicas)] for place in own]
        yield partial(made, spec, 2 * count + 2, ranks)


PIPELINES = [straight, several]


def operations(orders: Orders) -> dict[int, RankOperations]:
    return {
        rank: RankOperations(orders.assignment, actions) for rank, actions in orders.actions.items()
    }


def sampled(pipelines: Iterator[Callable[[], Orders]], every: int) -> Iterator[Orders]:
    return (make() for make in itertools.islice(pipelines, 0, None, every))


GPUS = {
    "hosts that connect": Gpu(),
    "a pool of 32 streams": Gpu(streams=32),
    "32 queues": Gpu(streams=32, queues=32),
}


@pytest.mark.parametrize("pipelines", PIPELINES)
@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.thorough)])
def test_no_pipeline_hangs(pipelines, every: int) -> None:  # type: ignore[no-untyped-def]
    for orders in sampled(pipelines(), every):
        for name, gpu in GPUS.items():
            assert not hangs(operations(orders), gpu), (name, orders.schedule.spec)


@pytest.mark.parametrize(
    "gpu",
    [Gpu(used_first=False), Gpu(done_first=False), Gpu(streams=1), Gpu(queues=1)],
    ids=["never used before", "never done before", "one stream", "one queue"],
)
def test_the_replay_sees_a_pipeline_hang(gpu: Gpu) -> None:
    """As each did before its mend, at the first minibatch."""
    spec = PipelineSpec("flush", (1,) * 4, links(4, False), 5)
    orders = Orders.made(Schedule(spec, 17), [[rank] for rank in range(4)])
    assert hangs(operations(orders), gpu)


@pytest.mark.parametrize("pipelines", PIPELINES)
@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.thorough)])
def test_what_ranks_do_together_has_one_order_and_few_communicators(pipelines, every) -> None:  # type: ignore[no-untyped-def]
    for orders in sampled(pipelines(), every):
        assert disorder(orders.actions, orders.assignment) is None, orders.schedule.spec
        for own in operations(orders).values():
            made = {each.communicator for _, begun in own for each in begun}
            assert len(made) < MOST, orders.schedule.spec
