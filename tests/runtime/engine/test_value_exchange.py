"""Values between stages of any meshes and placements, by real processes, exact to the last element.

All cases run in one set of four processes. Each of them draws the same cases and plans them itself.
Some ranks are on both sides; links between the stages are as fast as those within, or slower.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from processes import free_port, run_processes
from sharded import MESHES, Array, local_part, random_placements, random_shape, received
from torch import Tensor

from pipedream.capture.captured import Value
from pipedream.graph.cluster import Cluster
from pipedream.graph.placements.placement import Mesh, Placements, device_count
from pipedream.graph.plan import WorkerGroup
from pipedream.runtime.stages.crossings import Crossing, Crossings, Side
from pipedream.schedule.action import Action, Kind

RANKS = 4
CLUSTERS = (
    Cluster(machines=(4,), bandwidth=(1e9,)),
    Cluster(machines=(1, 4), bandwidth=(1e12, 1e6)),
    Cluster(machines=(2, 2), bandwidth=(1e12, 1e6)),
)


class Sent(NamedTuple):
    """A value and its gradient, with the mesh, the placements and the ranks of either stage."""

    array: Array
    gradient: Array
    source: tuple[Mesh, Placements, tuple[int, ...]]
    target: tuple[Mesh, Placements, tuple[int, ...]]
    cluster: Cluster

    @property
    def crossing(self) -> Crossing:
        value = Value("value", "node1", self.array.shape, torch.float64, True)
        return Crossing(value, Side(*self.source), Side(*self.target), self.cluster)


def random_sent(rng: random.Random) -> Sent:
    shape = random_shape(rng)
    sides = []
    for mesh in (rng.choice(((), (1,), (3,), *MESHES)), rng.choice(((), (1,), (3,), *MESHES))):
        ranks = tuple(rng.sample(range(RANKS), device_count(mesh)))
        sides.append((mesh, random_placements(rng, shape, mesh, partial=False), ranks))
    arrays = [np.random.default_rng(rng.getrandbits(32)).random(shape) for _ in range(2)]
    return Sent(arrays[0], arrays[1], sides[0], sides[1], rng.choice(CLUSTERS))


class Held(NamedTuple):
    """What a rank has of the value as the target, and of its gradient as the source."""

    value: Array | None
    gradient: Array | None
    gathered: bool


def run_cases(rank: int, ranks: int, port: int, cases: int) -> list[Held]:
    from pipedream.comm.rank_info import RankInfo
    from pipedream.comm.rendezvous import connect_store, join
    from pipedream.comm.transport import Transport

    rank_info = RankInfo(rank, ranks, rank, ranks, "127.0.0.1", port)
    join(rank_info, connect_store(rank_info, 60.0), "gloo", torch.device("cpu"), 60.0)
    rng, transport = random.Random(1), Transport(torch.device("cpu"), "gloo")
    teams = _Teams()
    done = [_exchanged(rank, random_sent(rng), transport, teams) for _ in range(cases)]
    transport.drain()
    transport.barrier()
    return done


class _Teams:
    """Groups of ranks by their order, made by all ranks when one is first needed."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], object] = {}

    def of(self, mesh: Mesh, ranks: tuple[int, ...]) -> object:
        from mesh_groups import team_groups

        flat = (device_count(mesh),)
        if ranks not in self.known:
            (self.known[ranks],) = team_groups([(flat, ranks)])
        return self.known[ranks]


def _exchanged(rank: int, case: Sent, transport: object, teams: _Teams) -> Held:
    """The value goes there, then its gradient back."""
    crossings = Crossings({0: (case.crossing,)}, {1: (case.crossing,)})
    there = [(Kind.SEND_ACTIVATION, 0), (Kind.RECV_ACTIVATION, 1)]
    back = [(Kind.SEND_GRADIENT, 1), (Kind.RECV_GRADIENT, 0)]
    results = [
        _crossed(rank, case, crossings, kinds, array, transport, teams)
        for kinds, array in ((there, case.array), (back, case.gradient))
    ]
    gathered = bool(case.crossing.there.gathers or case.crossing.back.gathers)
    return Held(results[0], results[1], gathered)


def _crossed(rank, case, crossings, kinds, array, transport, teams) -> Array | None:  # type: ignore[no-untyped-def]
    from pipedream.runtime.engine.value_exchange import ValueExchange

    sides = (case.source, case.target)
    assignment = [[WorkerGroup(side[2])] for side in sides]
    groups = [teams.of(side[0], side[2]) for side in sides]
    result = None
    ends = []
    for kind, stage in kinds:
        mesh, placements, ranks = sides[stage]
        if rank in ranks:
            device, action = ranks.index(rank), Action(kind, stage, 0, 0, 0, peer=(1 - stage, 0))
            group = groups[stage]
            exchange = ValueExchange(transport, assignment, device, group)
            ends.append((exchange, action, (mesh, placements, device)))
    for exchange, action, _ in ends:
        if action.kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
            exchange.post(action, crossings)
    for exchange, action, place in ends:
        if action.kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
            (tensor,), _ = exchange.receive(action, crossings)
            result = tensor.numpy().copy()
        else:
            own: Tensor = torch.from_numpy(local_part(array, *place).copy())
            exchange.send(action, crossings, [own])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("cases", [40, pytest.param(500, marks=pytest.mark.thorough)])
def test_random_cases_by_four_processes(cases: int) -> None:
    by_rank = run_processes(run_cases, RANKS, free_port(), cases)
    rng = random.Random(1)
    for number in range(cases):
        case, held = random_sent(rng), [each[number] for each in by_rank]
        check([each.value for each in held], case.array, case.target)
        check([each.gradient for each in held], case.gradient, case.source)
        check_bytes(case)
    assert any(each.gathered for each in by_rank[0])
    assert not all(each.gathered for each in by_rank[0])


def check(held: list[Array | None], array: Array, side: tuple[Mesh, Placements, tuple[int, ...]]):  # type: ignore[no-untyped-def]
    mesh, placements, ranks = side
    for rank, own in enumerate(held):
        if rank not in ranks:
            assert own is None
            continue
        expected = local_part(array, mesh, placements, ranks.index(rank))
        assert own is not None
        assert own.shape == expected.shape
        assert (own == expected).all()


def check_bytes(case: Sent) -> None:
    """Never more than all that the devices hold."""
    (mesh, placements, ranks), way = case.target, case.crossing.there
    whole = [local_part(case.array, mesh, placements, d).nbytes for d in range(len(ranks))]
    assert sum(way.sent(8).values()) <= sum(whole)
    for device, size in enumerate(whole):
        assert received(way, 8)[device] + way.gathered(8).get(device, 0) == size
